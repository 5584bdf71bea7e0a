"""Initial weights, one tensor at a time: a model on the meta device, and where its values come from.

Three sources with one interface (`TensorSource`): `record` for a callable that builds the model,
`from_module` for a model that is already built, `from_meta` for a module on the meta device without the
callable that built it.
"""

from tensorshard.weights.initial.recording import Recording, from_meta, record
from tensorshard.weights.initial.source import HeldTensors, TensorSource, from_module

__all__ = ["HeldTensors", "Recording", "TensorSource", "from_meta", "from_module", "record"]
