"""Lightning's examples of a LightningModule, rebuilt small: an autoencoder with a classifier, on data that is made up.

The strategy is what a test changes.
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitModel(pl.LightningModule):
    def __init__(self, rate=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16))
        self.head = nn.Linear(8, 4)
        self.seen = []

    def forward(self, x):
        return self.head(self.encoder(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        z = self.encoder(x)  # not by way of forward, as Lightning's own examples
        loss = nn.functional.mse_loss(self.decoder(z), x) + nn.functional.cross_entropy(self.head(z), y)
        self.log("train_loss", loss)
        self.seen.append(loss.detach().clone())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(dim=-1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=24)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(samples, batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 16, generator=generator)
    return DataLoader(TensorDataset(x, (x.sum(dim=1) > 0).long() + (x[:, 0] > 0) * 2), batch_size=batch_size)


def main(arguments):
    strategy, batch_size = arguments.pop("strategy", "auto"), arguments.pop("batch_size")
    folder, resume, predicts = arguments.pop("folder"), arguments.pop("resume", None), arguments.pop("predict", False)
    pl.seed_everything(0, verbose=False)
    model = LitModel()
    saved = ModelCheckpoint(dirpath=folder, filename="{epoch}", monitor="val_loss", save_top_k=-1)
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu", "strategy": strategy, "max_epochs": 3, "callbacks": [saved], "logger": False,
            "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1, **arguments,
        }
    )  # fmt: skip
    trainer.fit(model, loader(64, batch_size, 1), loader(16, batch_size, 2), ckpt_path=resume)
    found = {
        "losses": [float(trainer.strategy.reduce(loss)) for loss in model.seen],
        "validated": float(trainer.callback_metrics["val_loss"]),
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "steps": trainer.global_step,
        "best": str(saved.best_model_path),
        "tested": float(trainer.test(model, loader(16, batch_size, 3), verbose=False)[0]["val_loss"]),
    }
    if predicts:
        found["predicted"] = torch.cat(trainer.predict(model, loader(16, batch_size, 3))).tolist()
    return found
