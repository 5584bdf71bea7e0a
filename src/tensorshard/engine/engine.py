"""The Engine: one optimizer step under any plan."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, overload

import torch

from tensorshard.checkpoint.between_saves import BackgroundSaves, RegisteredStates
from tensorshard.comm.call_watch import CallWatch
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.engine.average import WeightAverages
from tensorshard.engine.engine_random import EngineRandom, kept_random_state
from tensorshard.engine.generation import Generator, target_log_probs
from tensorshard.engine.gradients import (
    FinalGradients,
    GradientNorm,
    LaunchedCheck,
    LossScaler,
    NonFiniteLossError,
    NotTakenError,
)
from tensorshard.engine.guards.batch_buffers import BatchBuffers
from tensorshard.engine.guards.foreign_optimizers import ModuleChanges, mark_trained
from tensorshard.engine.guards.independent_samples import IndependentSamples
from tensorshard.engine.guards.own_collectives import OwnCollectives, explained
from tensorshard.engine.guards.replay import compare_repeated
from tensorshard.engine.guards.state_dicts import guard_optimizer_state, guard_state_dicts
from tensorshard.engine.guards.uneven_means import UnevenMeans, check_independent_samples
from tensorshard.engine.guards.wrong_batch import cause_in_batches
from tensorshard.engine.last_batch import BatchShares
from tensorshard.engine.loader import EngineLoaders
from tensorshard.engine.loop_methods import LoopMethods
from tensorshard.engine.loss import MeansWithoutGraphs, Objective, model_loss
from tensorshard.engine.loss_terms import takes_model
from tensorshard.engine.loss_with_model import LossWithModelRunner, NeedsGradientError
from tensorshard.engine.manual_forwards import ManualForwards
from tensorshard.engine.manual_loop import ManualLoop
from tensorshard.engine.measures import Metrics, check_loader, gathered_batches, is_loader, pair, samples_of
from tensorshard.engine.optimizer import (
    OptimizerFactory,
    StepCounter,
    TrainedParameters,
    complete_update,
    make_optimizer,
)
from tensorshard.engine.optimizer_states import show_states
from tensorshard.engine.penalties import Penalties
from tensorshard.engine.same_numbers import SameNumbers
from tensorshard.engine.state import StateMethods
from tensorshard.engine.step import (
    Read,
    StepAgain,
    StepLoss,
    StepRunner,
    WholeModelStepRunner,
    mean_metrics,
    mean_over_batches,
)
from tensorshard.host.process_settings import HostHeap
from tensorshard.model.call_stack import users_line
from tensorshard.model.forward_contexts import RootRole, hook_root, surround_root
from tensorshard.model.parameters import BufferValues, Registration
from tensorshard.model.trains_itself import OwnRule
from tensorshard.model.transformers_settings import GenerationCache
from tensorshard.passes.compile import CompileLog
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.plan.storage import Storage
from tensorshard.random.call_sites import ModelRandomness
from tensorshard.random.users_draws import UsersDraws
from tensorshard.torch_private.compilation import explained_compilation

__all__ = ["Engine", "LossFunction", "NonFiniteLossError"]

# Buffers of at most this many bytes are copied before every step, larger ones only if a step has changed them before.
_SMALL_BYTES = 1 << 20

LossFunction = Callable[[Any, Any], Any]

_NOTHING = object()  # in place of targets, which may be None


class Engine(LoopMethods, StateMethods):
    """A model, its optimizer and one call, :meth:`step`, under any plan. Made by :func:`tensorshard.parallelize`.

    Attributes:
        model: callable as before; it holds this rank's part of the parameters. You can write your own loop with
            ``engine.model(x)``, :meth:`backward`, ``engine.optimizer.step()``, ``engine.optimizer.zero_grad()``
            (``docs/your-own-loop.md``). With a pipeline it holds this rank's stages, and cannot be called.
        optimizer: updates the master weights. Build learning-rate schedulers on it. Its ``step()`` checks and clips
            the gradients as the plan says.
        scaler: the loss scaler of fp16, or None.
        call_watch: finds ranks that keep the others waiting. Its ``stacks`` is the folder where all ranks then write
            their stacks; None for none.
        metrics: means over the global batch of what ``loss_fn(model, batch)`` returned by name, in the last
            :meth:`step` or :meth:`evaluate`: a dict of fp32 scalars, the same on every rank (``docs/losses.md``).
        random: the random streams for dropout and the like, within the Engine's calls and the model's forward. torch's
            global generators are left to you.

    Examples:
        >>> adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
        >>> build = functools.partial(torch.nn.Linear, 16, 4)
        >>> engine = ts.parallelize(build, ts.Plan(), optimizer=adamw, loss_fn=torch.nn.functional.mse_loss)
        >>> loss = engine.step(torch.randn(8, 16), torch.randn(8, 4))
        >>> engine.save("checkpoints/step-1")
        >>> engine.load("checkpoints/step-1")
        {}
    """

    _check: LaunchedCheck | None = None  # of the update that is being launched
    _numbers: SameNumbers | None = None  # if random numbers do not depend on the plan

    def __init__(
        self,
        sharded: ShardedModel,
        plan: Plan,
        mesh: Mesh,
        *,
        optimizer: OptimizerFactory,
        loss_fn: LossFunction,
        device: torch.device,
        random: EngineRandom,
        cache: GenerationCache,
        own_rules: Sequence[OwnRule] = (),
        debug: bool = False,
        check_samples: bool = True,
        watchdog: bool | float = True,
        storage: Storage,
        heap: HostHeap | None = None,
    ) -> None:
        self.plan, self.mesh, self.device = plan, mesh, device
        self._model, self._averages = sharded.model, WeightAverages(sharded, self._finish_update, self.predict)
        self._modules = sharded.all_modules()  # listing them takes a tenth of a millisecond a block
        self.sharded = sharded
        self.loss_fn = loss_fn
        self.storage = storage
        self._heap = heap
        self._steps = StepCounter(heap, mesh, warns=mesh.rank == 0)
        self.scaler = LossScaler() if plan.precision == "fp16" else None
        self._means = UnevenMeans(mesh, plan.micro_batches)
        self._penalties = Penalties(sharded, mesh, device)
        self.random = random
        self.loaders = EngineLoaders()
        self._cache = cache
        self._debug = self._check_samples = debug  # the latter: before the next step
        self._compile_log = CompileLog() if plan.compile and mesh.rank == 0 else None
        self._own_collectives = OwnCollectives(plan)
        if plan.pp == 1:  # a loop of one's own calls the model; stages of a pipeline cannot be called
            surround_root(sharded.model, RootRole.OWN_COLLECTIVES, self._own_collectives.watched)
            surround_root(sharded.model, RootRole.RANDOM_STREAMS, random.installed)
            surround_root(sharded.model, RootRole.CACHE_OFF, partial(cache.off_in_training, sharded.model))
            if self._compile_log is not None:
                surround_root(sharded.model, RootRole.COMPILE_LOG, self._compile_log.watched)
            hook_root(
                sharded.model,
                RootRole.TRANSFERS,
                after=lambda *_: None if torch.is_grad_enabled() else storage.check_transfers(),
            )
        self._background, self._states = BackgroundSaves(mesh.world_group), RegisteredStates()
        self._watch = self.call_watch = CallWatch(
            mesh.groups(),
            device,
            internal=StepAgain,
            axes=mesh.group_names(),
            line_of=users_line,
            enabled=watchdog is not False,
            patience=None if isinstance(watchdog, bool) else float(watchdog),
        )
        self._changing: set[tuple[int, str]] | None = None  # which buffers steps change; None before the first
        trained = sharded.trained_masters()
        self._optimizer, self._owners, again = make_optimizer(optimizer, own_rules, sharded, plan, mesh)
        self._update = storage.keep_states(self._optimizer, sharded, trained, again)
        self._gradients = FinalGradients(sharded, plan, mesh, self.scaler, device, self._update)
        self._changes = ModuleChanges(sharded.model)
        self._trained = TrainedParameters(
            self._optimizer, again, sharded, self._owners, reserved=self._update.reserves_states
        )
        batch_buffers = BatchBuffers(sharded, mesh, device)
        self._samples = IndependentSamples(
            sharded,
            plan,
            mesh,
            device,
            inside=self._inside,
            run=self._run_again,
            numbers=lambda: self._numbers,
            is_asked=check_samples,
        )
        complete_update(
            self._optimizer,
            sharded,
            follow=(
                lambda: self._trained.follow(self._gradients.trained),
                show_states(self._optimizer, sharded, self._owners),
            ),
            before=(
                self._background.check,
                lambda: storage.check_transfers(of_update=True),
                self._averages.before_update,
                sharded.finish_backward,
                lambda: batch_buffers.check(self.step_count),
                self._samples.check,
                *([] if self._owners is None else [self._owners.gather]),
            ),
            after=(self._conclude_check, self._after_update),
        )
        self._shares = BatchShares(self.loaders, mesh)
        self._forwards = ManualForwards(sharded, plan, mesh, device, self._shares, self._means)
        self._step_runner = _step_runner_for(
            sharded,
            plan,
            mesh,
            Objective(loss_fn, plan.precision, device, sharded.calling_user, self._means),
            self._forwards,
        )
        self._step_runner.watch_loaders(self.loaders, batch_buffers.note_stand_ins)
        self._step_runner.note_inputs = self._samples.note if plan.pp > 1 else None
        self.metrics: dict[str, torch.Tensor] = {}
        self._manual_loop = ManualLoop(
            sharded,
            self._optimizer,
            plan,
            mesh,
            self._gradients,
            self.scaler,
            device,
            self._forwards,
            self._trained,
            self._changes,
            self._steps,
            self._watch,
            self._means,
        )
        guard_state_dicts(sharded, plan)
        if plan.pp > 1 or any(count > 1 for count in sharded.num_shards().values()):
            guard_optimizer_state(self._optimizer, plan, mesh)
        wholes = [] if self._owners is None else self._owners.parameters.values()
        shown = sharded.shown_parameters().values()
        mark_trained(
            [*sharded.masters().values(), *wholes], shown, self._optimizer, self._manual_loop.before_foreign_optimizer
        )

    def _first_of(self, rows: int) -> int:
        """The number, in the whole batch, of the first of `rows` that belong to this rank's samples."""
        if self._numbers is not None and (first := self._numbers.first_of(rows)) is not None:
            return first
        for loader in self.loaders.by_name.values():
            if loader.uneven is not None and loader.uneven[self.mesh.dp_rank] == rows:
                return sum(loader.uneven[: self.mesh.dp_rank])
        return self.mesh.dp_rank * rows

    def _micro_batch(self) -> int | None:
        """How many micro-batches steps have begun so far; None outside of a step."""
        return None if self._numbers is None else self._numbers.micro_batch

    def draw_from(self, randomness: ModelRandomness | None) -> None:
        """Lets the model draw from `randomness`, which knows its modules; None for torch's generators."""
        self.random.step_count = lambda: self.step_count
        self.random.users_draws = UsersDraws(
            lambda: self.random.seed, self.random.step_count, self._first_of, self._micro_batch
        )
        if randomness is None:
            return
        self._numbers = SameNumbers(randomness, self.plan, self.mesh, self.device, self.random.step_count)
        self._step_runner.draw_from(self._numbers)
        if self.plan.pp == 1:
            self._numbers.follow(self._model)

    # -- one step --

    def step(self, inputs: Any, targets: Any = _NOTHING) -> torch.Tensor:
        """One optimizer step on this data rank's batch, with all its micro-batches. Older gradients are discarded.

        Every rank calls it. Ranks that differ only along tp, cp or pp pass the same batch.

        Args:
            inputs: a tensor, or a tuple or dict of tensors (positional or keyword arguments of the model). The first
                dimension of each is the samples. For a ``loss_fn(model, batch)``: the batch, any nest of tensors.
            targets: what the loss function takes besides the output. The first dimension is the samples. Left out for a
                ``loss_fn(model, batch)``, which otherwise gets the pair as its batch.

        Returns:
            The mean loss over the global batch before the update, with the penalties of :meth:`add_penalty`: a scalar,
            the same on every rank.

        Raises:
            TypeError: there are no targets, and the loss function is a ``loss_fn(output, targets)``.
            ValueError: the batch does not split into ``plan.micro_batches`` equal parts. One of :meth:`loader` may be
                uneven, if each rank has a sample of it for each micro-batch, or it is the epoch's last, smaller one.
                Ranks that differ only along tp, cp or pp pass different batches; the loss does not depend on the model.
            NonFiniteLossError: the loss or the gradient's norm is NaN or infinite, on any rank.

        If every rank raises before the update, then weights, optimizer, buffers (running statistics too) and random
        streams are as before, and training can go on. If only one rank raises, the others raise within seconds and
        name it (on NCCL, after the timeout of their groups), and the process group cannot be used any more.
        """
        targets = self._targets("step", targets)
        before = self._buffers_before()
        self._manual_loop.forget()
        try:
            with self._call("step"), self._cache.off():
                loss = self._step(inputs, targets)
        except BaseException as error:
            self._step_runner.abandon()
            self._optimizer.zero_grad(set_to_none=True)
            before.restore()
            if isinstance(error, StepAgain):
                return self.step(inputs, targets)
            raise
        self._changing = self._changing or set()
        self._changing.update((id(module), name) for places in before.changed() for module, name in places)
        return loss

    def _targets(self, call: str, targets: Any) -> Any:
        """What a call was given as targets; None where a ``loss_fn(model, batch)`` needs none."""
        if targets is not _NOTHING:
            return targets
        if not takes_model(self.loss_fn):
            raise TypeError(
                f"engine.{call} was given a batch without targets, and loss_fn is called as loss_fn(output, targets): "
                f"pass engine.{call}(inputs, targets), or a loss_fn(model, batch), which calls the model itself"
            )
        return None

    def over_whole_batch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, computed over the tokens of all data ranks and micro-batches, as a balance loss has to be.

        The result is for the model's forward or the loss function, and is a part of the loss as on one process. Each
        rank gets the arguments of all ranks. With micro-batches, a step begins with the forwards of all of them,
        without gradients. Functions of transformers' models that balance their routers are computed so already.

        Args:
            function: takes tensors whose first dimension is tokens or samples, in any nest, and other arguments that
                are the same on all ranks. It returns a scalar tensor.

        Raises:
            RuntimeError: when it is called under cp or pp, or with micro-batches in a loop of your own.

        Examples:
            >>> def balance(logits):  # of a router, [tokens, experts]
            ...     shares = torch.nn.functional.one_hot(logits.argmax(-1), logits.size(-1)).float().mean(0)
            ...     return (shares * logits.softmax(-1).mean(0)).sum() * logits.size(-1)
            >>> loss_fn = lambda output, targets: torch.nn.functional.mse_loss(output, targets) + balance(output)
            >>> adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
            >>> engine = ts.parallelize(torch.nn.Linear(16, 4), ts.Plan(), optimizer=adamw, loss_fn=loss_fn)
            >>> balance = engine.over_whole_batch(balance)
            >>> loss = engine.step(torch.randn(8, 16), torch.randn(8, 4))
        """
        return self._step_runner.whole_batch.of(function)

    def _buffers_before(self) -> BufferValues:
        def wanted(buffer: torch.Tensor, places: list[Registration]) -> bool:
            if self._changing is None or buffer.nbytes <= _SMALL_BYTES:
                return True
            return any((id(module), name) in self._changing for module, name in places)

        return BufferValues(self._modules, wanted)

    @torch.no_grad()
    def _check_independent_samples(self, inputs: Any, targets: Any) -> None:
        if self._step_runner.batches.need_stand_ins(inputs, targets, self.plan.micro_batches):
            return  # dealt otherwise, it would not be known; the next batch is checked
        self._check_samples = False
        with self._evaluation_mode(), suppress(NeedsGradientError):  # then it is not checked
            check_independent_samples(
                lambda *batch: self._step_runner.evaluate(*batch, micro_batches=self.plan.micro_batches).mean,
                self.mesh,
                inputs,
                targets,
                micro_batches=self.plan.micro_batches,
                tolerance=(1e-4 if self._debug else 1e-5) if self.plan.precision == "fp32" else 1e-2,
                is_asked=self._debug,
            )

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Around runs of the model that are no step's, and of which nothing is to be left."""
        with self.random.installed("again"), self._forwards.inside_engine_call(), self._cache.off():
            yield

    def _run_again(self, given: Any, read: Callable[[Any], None]) -> None:
        """Runs the model on what it was given before, and reads its output, with the random numbers of a step."""
        with nullcontext() if self._numbers is None else self._numbers.call():
            self._step_runner.run(given, read)

    def replay(self, inputs: Any, targets: Any = _NOTHING) -> None:
        """Runs forward and backward of a micro-batch twice and compares the bits. Nothing is changed.

        A processor or memory that returns a wrong number now and then is found so. The first micro-batch is taken, all
        of them under a pipeline. It costs two forwards and backwards of it. Every rank calls it, with a batch as for
        :meth:`step`. On GPUs, kernels that sum in no fixed order can differ: set
        ``torch.use_deterministic_algorithms(True)``.

        Raises:
            ReplayMismatchError: some rank computed something else the second time, which the message names. Every rank
                raises it.
        """

        targets = self._targets("replay", targets)

        def once() -> None:
            before = self._buffers_before()
            with kept_random_state(self.device):
                try:
                    scale = self.scaler.scale if self.scaler else 1.0
                    self._step_runner.train(inputs, targets, scale, first_alone=True)
                finally:
                    self._step_runner.abandon()
                    self._optimizer.zero_grad(set_to_none=True)
                    before.restore()

        self._manual_loop.forget()
        self._finish_update()
        with self._call("replay"), self._cache.off():
            compare_repeated(once, self.mesh.world_group)

    def _step(self, inputs: Any, targets: Any) -> torch.Tensor:
        self._changes.check()
        self._trained.check()
        self._samples.samples_are_first()
        if self._check_samples:
            self._check_independent_samples(inputs, targets)
        self._means.begin()
        self._means.note_batch((inputs, targets))
        with self._own_collectives.watched() if self.plan.pp > 1 else nullcontext():
            loss = self._step_runner.train(inputs, targets, self.scaler.scale if self.scaler else 1.0)
        self._check_samples = self._means.compare() and not self._debug
        self.storage.check_transfers(of_update=True)
        factor: torch.Tensor | float | None = loss.correction
        if self.scaler is not None:
            factor = (1.0 if factor is None else factor) / self.scaler.scale
        mean = self._penalties.add(loss.mean, factor)
        if self._gradients.has_parameter_hooks():
            self._gradients.refresh()
            self._gradients.scale(factor)
            factor = None
            self._gradients.call_parameter_hooks()
        if not self._launched_update(mean, factor):
            try:
                checked = self._gradients.prepare(mean, factor, steps_taken=self.step_count)
            except NonFiniteLossError as error:
                cause = cause_in_batches(self.mesh, inputs, targets, self.plan.micro_batches)
                raise NonFiniteLossError(error.fact, cause) from None
            if checked is not None:
                self._update.step(self._gradients.trained.values(), checked.scale)
        self._optimizer.zero_grad(set_to_none=True)
        self._steps.count()
        self.metrics = mean_metrics([loss])
        return mean

    def _conclude_check(self) -> None:
        """Called between an update and what follows it."""
        if self._check is not None and not self._gradients.conclude(self._check):
            raise NotTakenError

    def _launched_update(self, mean: torch.Tensor, factor: torch.Tensor | float | None) -> bool:
        """Updates the weights if that can be launched before the host knows that it is to be taken, so that the device
        does not wait for the host. False: nothing was changed."""
        self._check = self._gradients.launch_check(mean, factor) if self._update.may_skip else None
        if self._check is None:
            return False
        try:
            self._update.step_unless(self._gradients.trained.values(), self._check.scale, self._check.skip)
        except NotTakenError:
            return False
        finally:
            self._check = None
        return True

    @property
    def step_count(self) -> int:
        """Optimizer steps so far, including those that fp16 has skipped."""
        return self._steps.taken

    @property
    def keeps_freed_memory(self) -> bool:
        """Whether this rank computes on a CPU and keeps the memory of freed tensors for its next step, since there is
        room. It then holds more than its tensors take."""
        return self._heap is not None and self._heap.keeps

    @property
    def grad_norm(self) -> GradientNorm | None:
        """L2 norm of the whole model's gradient in the last step, before clipping: a float, the same on every rank.

        None before the first step. Reading it waits for the device, and is no collective.
        """
        norm = self._gradients.norm
        return None if norm is None else GradientNorm(norm)

    @overload
    def evaluate(self, inputs: Any, targets: Any) -> torch.Tensor: ...

    @overload
    def evaluate(self, inputs: Iterable[Any], *, metrics: None = None) -> torch.Tensor: ...

    @overload
    def evaluate(self, inputs: Iterable[Any], *, metrics: Any) -> Any: ...

    @torch.no_grad()
    def evaluate(self, inputs: Any, targets: Any = _NOTHING, *, metrics: Any = None) -> Any:
        """The mean loss over a batch, or the loss or metrics over all batches of a loader, in evaluation mode.

        ::

            loss = engine.evaluate(inputs, targets)
            loss = engine.evaluate(loader)
            loss = engine.evaluate(batch)  # of a loss_fn(model, batch)
            accuracy = engine.evaluate(loader, metrics=torchmetrics.classification.MulticlassAccuracy(10))
            found = engine.evaluate(loader, metrics={"accuracy": ..., "confusion": ...})

        Each sample counts once, on any number of ranks: take ``engine.loader(dataset, batch_size, shuffle=False)``.
        Every rank calls it. For `metrics`, each rank gets the outputs and targets of all data ranks, so that it holds
        those of one whole batch at a time. If ranks have padded their samples to different lengths, ``update`` is
        called for one rank's after another's.

        Args:
            inputs: this data rank's inputs, as for :meth:`step`; or a loader of batches ``(inputs, targets)``, without
                `targets`. For a ``loss_fn(model, batch)`` a batch, or a loader of batches.
            targets: this data rank's targets.
            metrics: an object with ``update(outputs, targets)``, ``compute()`` and ``reset()``, as torchmetrics has
                them, or a dict of such by name. It is reset before and afterwards. Modules are moved to the Engine's
                device.

        Returns:
            The mean loss over the global batch, or over all samples of the loader (weighted by the counts if loss_fn
            returns sums and counts): a scalar, the same on every rank. With `metrics`, what their ``compute()``
            returns, or a dict of that by name.

        Raises:
            TypeError: a batch without targets; a loader's batch is not a pair; something in `metrics` is no metric.
            ValueError: the loader fills up its last batch with samples that it has given already.
        """
        if targets is _NOTHING and takes_model(self.loss_fn) and metrics is None and not is_loader(inputs):
            targets = None
        if targets is _NOTHING:
            check_loader(inputs)
            if metrics is not None:
                batches = gathered_batches(inputs, self.predict, self._step_runner.batches, self.mesh, self.device)
                return Metrics(metrics, self.device).evaluate(batches)
            as_pair = (lambda batch: (batch, None)) if takes_model(self.loss_fn) else pair
            losses = [self._evaluate(*as_pair(batch)) for batch in inputs]
            if not losses:
                raise ValueError("engine.evaluate was given a loader without a batch; it needs at least one")
            self.metrics = mean_metrics(losses)
            return mean_over_batches(losses)
        if metrics is not None:
            raise TypeError("engine.evaluate was given targets and metrics; metrics are those of a loader's batches")
        loss = self._evaluate(inputs, targets)
        self.metrics = mean_metrics([loss])
        return loss.mean

    def _evaluate(self, inputs: Any, targets: Any) -> StepLoss:
        counts = MeansWithoutGraphs() if self.loss_fn is model_loss else nullcontext()
        with self._call("evaluate"), self._cache.off(), self._evaluation_mode(), counts:
            self._finish_update()
            loss = self._step_runner.evaluate(inputs, targets)
            self.storage.check_transfers()
            return loss

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """The model's output for this data rank's batch, in evaluation mode, 16-bit tensors as fp32.

        Ranks that differ only along tp, cp or pp pass the same batch and all get the output. With a pipeline the batch
        goes through it in micro-batches, whose outputs are concatenated along their first dimension.

        Raises:
            ValueError: the outputs of micro-batches cannot be concatenated; ranks that should pass the same batch do
                not.
        """
        with self._call("predict"), self._evaluation_mode():
            self.wait_for_update()
            return self._predict(inputs, compare=inputs)

    @torch.no_grad()
    def log_probs(self, inputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """The log-probability of each target under the model, in evaluation mode: of a policy or a reference, say.

        The model returns logits: alone, first in a tuple, or as ``.logits``. Large ones are computed in tiles and not
        held, as the plan says (``Plan(logits=...)``). Every rank calls it, as for :meth:`predict`.

        Args:
            inputs: this data rank's inputs, as for :meth:`step`.
            targets: classes, of the shape of the logits without their last dimension; -100 where there is none. For a
                causal language model they are the inputs moved by one.

        Returns:
            fp32, of the shape of `targets`; 0 where there is no target. Without gradients.

        Raises:
            ValueError: the model returns no logits of that shape.
        """
        return self._read_output("log_probs", inputs, targets, target_log_probs)

    @torch.no_grad()
    def _read_output(self, call: str, inputs: Any, targets: Any, read: Read) -> Any:
        """What `read` makes of the output for this data rank's `inputs`, in evaluation mode, and of their `targets`.

        Args:
            call: its name for messages.
        """
        with self._call(call), self._evaluation_mode():
            self.wait_for_update()
            compare = inputs if targets is None else (inputs, targets)
            return self._predict(inputs, compare=compare, read=read, targets=targets)

    def _predict(self, inputs: Any, *, compare: Any, read: Read | None = None, targets: Any = None) -> Any:
        # Micro-batches of a pipeline cannot share a cache.
        cache = self._cache.off() if self.plan.pp > 1 or self.plan.cp > 1 or read is not None else nullcontext()
        with cache:
            output = self._step_runner.predict(inputs, compare=compare, read=read, targets=targets)
        self.storage.check_transfers()
        return output

    @torch.no_grad()
    def generate(
        self,
        prompts: torch.Tensor,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        eos_token_id: int | None = None,
        seed: int = 0,
    ) -> torch.Tensor:
        """Extends `prompts` with a causal language model, one token at a time, as one process would.

        The model takes token ids (as ``input_ids``, if its forward has such an argument) and returns logits of shape
        [samples, tokens, vocabulary]: alone, first in a tuple, or as ``.logits``. Models of transformers use their
        cache of keys and values; others, and pipelines, read the whole sequence for each token. Every rank calls this;
        ranks that differ only along tp, cp or pp with the same prompts.

        Args:
            prompts: token ids of shape [samples, tokens], all of one length.
            max_new_tokens: how many tokens each is extended by.
            temperature: logits are divided by it before a token is drawn; 0 takes the likeliest token.
            top_k: how many of the likeliest tokens are drawn from; None for all.
            eos_token_id: the token that ends a sample; the rest of the sample is filled with it. Generation stops when
                all samples have ended.
            seed: of the draws, which belong to the samples, in the order of the data ranks.

        Returns:
            Token ids of shape [samples, tokens + new ones], on the prompts' device.

        Raises:
            ValueError: the prompts, a number or the model do not allow it; the model cannot read so many tokens.
        """
        generator = Generator(self.sharded.structure, self._predict, self.mesh, self.device, self.plan.micro_batches)
        with self._call("generate"), self._evaluation_mode():
            self.wait_for_update()
            return generator.generate(
                prompts,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                eos_token_id=eos_token_id,
                seed=seed,
            )

    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        """The context of each call of the Engine that runs the model."""
        compiling = nullcontext() if self._compile_log is None else self._compile_log.watched()
        with (
            explained(f"engine.{name}", self._watch, counted=name in ("step", "evaluate", "replay")),
            explained_compilation(),
            self.random.installed(name),
            nullcontext() if self._numbers is None else self._numbers.call(),
            self._forwards.inside_engine_call(),
            samples_of(name, self.plan, self.mesh),
            compiling,
        ):
            yield
        if self._heap is not None and name != "step":  # steps are counted one by one, in a loop of one's own, too
            self._heap.after_call()

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        training = [module for module in self._modules if module.training]  # some may be frozen in eval mode
        self._model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True

    def draw_schedule(self, path: Any = None, *, micro_batches: int | None = None) -> str:
        """What each rank of the pipeline computes at which time of a step, and the share of its bubble, as text.

        In the drawing, all stages take the same time, and so do a forward, a backward of inputs and a backward of
        parameters.

        Args:
            path: also writes the drawing there: "schedule.svg", or "schedule.txt" for the text.
            micro_batches: how many micro-batches are drawn; None for the plan's number.

        Raises:
            ValueError: the plan has no pipeline.
        """
        from tensorshard.pipeline.run.draw_schedule import timeline

        if self.plan.pp == 1:
            raise ValueError("the plan has pp=1, so there is no schedule to draw; set pp to 2 or more")
        drawn = timeline(
            self.plan.pp_schedule,
            ranks=self.plan.pp,
            stages_per_rank=self.plan.stages_per_rank,
            micro_batches=micro_batches or self.plan.micro_batches,
        )
        if path is not None and self.mesh.rank == 0:
            drawn.save(path)
        return drawn.text()


def _step_runner_for(
    sharded: ShardedModel,
    plan: Plan,
    mesh: Mesh,
    objective: Objective,
    forwards: ManualForwards,
) -> StepRunner:
    device = objective.device
    if takes_model(objective.loss_fn):
        return LossWithModelRunner(sharded, plan, mesh, objective, device, forwards=forwards)
    if plan.pp == 1:
        return WholeModelStepRunner(sharded, plan, mesh, objective, device)
    from tensorshard.engine.pipeline_step import PipelineStepRunner
    from tensorshard.pipeline.run.pipelined_model import PipelinedModel

    assert isinstance(sharded, PipelinedModel)
    return PipelineStepRunner(sharded, plan, mesh, objective, device)
