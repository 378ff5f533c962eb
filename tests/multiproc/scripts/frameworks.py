"""Scripts for frameworks that know nothing of agentcomm: for `agentcomm run`.

frameworks.py WHAT [ATTACH]    With a spec as ATTACH the script attaches by itself.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


def data(nrows=256):
    torch.manual_seed(0)
    x = torch.randn(nrows, 16)
    return TensorDataset(x, x[:, :4].argmax(1))


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 4))


def say(text):
    os.write(1, f"{dist.get_rank()} {text}\n".encode())


def attach(module, spec):
    if spec:
        import agentcomm

        return agentcomm.attach(module, spec)
    return None


def checksum(model):
    return f"{sum(param.detach().double().sum() for param in model.parameters()).item():.12f}"


def lightning(spec):
    import lightning as L

    class Attach(L.Callback):
        def on_train_start(self, trainer, module):
            attach(trainer.strategy.model, spec)

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model_of()

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, callbacks=[Attach()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(data(), batch_size=16))  # fmt: skip
    say(checksum(module))


def fabric(spec):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = model_of()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(data(), batch_size=16))
    attach(model, spec)
    for x, labels in loader:
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(model(x), labels))
        optimizer.step()
    say(checksum(model))


def accelerate(spec):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    attach(model, spec)
    for x, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), labels))
        optimizer.step()
    say(checksum(model))
    accelerator.end_training()


def trainer(spec):
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model_of()

        def forward(self, x, labels):
            logits = self.net(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    class Attach(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            attach(task.model_wrapped, spec)

    rows = [{"x": x, "labels": label} for x, label in data()]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=16, num_train_epochs=1,
            learning_rate=0.1, report_to=[], save_strategy="no", disable_tqdm=True,
            logging_strategy="no", optim="sgd",
        )  # fmt: skip
        model = Classifier()
        task = Trainer(model, arguments, train_dataset=rows, callbacks=[Attach()])
        task.train()
        say(checksum(model))


def compiled(spec, mode="ddp_optimizer"):
    from torch.nn.parallel import DistributedDataParallel

    torch._dynamo.config.optimize_ddp = mode if mode != "no" else False
    dist.init_process_group("gloo")
    model = torch.compile(DistributedDataParallel(model_of()), backend="eager")
    attach(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context = (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
        if mode.startswith("python")
        else torch.enable_grad()
    )
    x, labels = data()[dist.get_rank() * 16 : dist.get_rank() * 16 + 16]
    with context:
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), labels).backward()
            optimizer.step()
    say(checksum(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    globals()[what](*(rest or [""]))
