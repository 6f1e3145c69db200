"""What the reader of a document has already: files of its folder, and names that snippets use.

``SETUP`` has, by document, what is made in the folder before its first block: blocks of the
tutorial, by the names of what they make, and commands. ``PRELUDES`` has, by document and first line
of a snippet, the lines that are put before it.
"""

from __future__ import annotations

NET, LLAMA = "model.py", "llama"
"""Made by blocks of the tutorial: a model file, and a folder ``llama`` with ``novel.txt``."""

TWO_RANKS = (
    NET,
    "autoparallel plan model.py --cluster cpu:2 --parallel dp=2 --global-batch 16 -o plan.json",
)
SETUP: dict[str, tuple[str, ...]] = {
    "README.md": (LLAMA,),
    "docs/checkpoints.md": (
        *TWO_RANKS,
        "autoparallel plan model.py --cluster cpu:2 --parallel pp=2,microbatches=4 "
        "--global-batch 16 -o other_plan.json",
        LLAMA,
        "yes 'It was a bright cold day in April.' | head -4000 > novel.txt",
    ),
    "docs/failures.md": TWO_RANKS,
    "docs/launching.md": (
        NET,
        "autoparallel plan model.py --cluster 2x8xH100 --global-batch 64 -o plan.json",
    ),
    "docs/extensions.md": (NET,),
    "docs/training.md": (NET,),
    "docs/sequences.md": (LLAMA,),
}

_TORCH = "import torch, autoparallel\ntorch.manual_seed(0)\n"
"""The seed is for batches that are the same on every rank: torch begins with a random one."""
_GPT = (
    _TORCH
    + """
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = torch.nn.Embedding(config["vocab"], 16)
        self.head = torch.nn.Linear(16, config["vocab"])

    def configure_optimizers(self, *options):
        return torch.optim.AdamW(self.parameters())

    def forward(self, x, y=None):
        logits = self.head(self.embedding(x))
        if y is None:
            return logits
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    @torch.no_grad()
    def generate(self, tokens):
        return torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)


config = {"vocab": 64}
data = [(torch.randint(64, (8, 16)), torch.randint(64, (8, 16))) for _ in range(3)]
x, y = data[0]
"""
)
_NET = (
    _TORCH
    + """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 1)

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.down(self.up(x).relu()), y)


batch = {"x": torch.randn(256, 16), "y": torch.randn(256, 1)}
data = batches = [batch] * 4
"""
)
_LLAMA = (
    _TORCH
    + """
import transformers
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4)
model = transformers.LlamaForCausalLM(config)
rows = torch.randint(64, (16, 8))
"""
)
_MODEL = _NET + "model = autoparallel.parallelize(Net(), example_batch=batch)\n"

PRELUDES: dict[tuple[str, str], str] = {
    ("README.md", "@autoparallel.parallelize(example_batch=(x, y))"): (
        "import autoparallel, torch\nfrom torch import nn\n"
        "torch.manual_seed(0)\nx = y = torch.randn(8, 512)\n"
    ),
    (
        "README.md",
        "model = autoparallel.parallelize(GPT(config), example_batch=(x, y))  # the one line",
    ): _GPT,
    ("docs/checkpoints.md", "step = autoparallel.Step(model)"): _MODEL
    + (
        "import shutil\n"
        "from torch.utils.data import DataLoader\n"
        "shutil.rmtree('run1')\n"
        "rows = [{key: value[at] for key, value in batch.items()} for at in range(256)]\n"
        "loader = autoparallel.distribute(DataLoader(rows, batch_size=256), model)\n"
        "first = autoparallel.Step(model)\n"
        "first(batch)\n"
        "first_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(first.optimizer, 1000)\n"
        "autoparallel.save('run1', first, step=1, scheduler=first_scheduler, data=loader)\n"
    ),
    (
        "docs/training.md",
        "loader = DataLoader(dataset, batch_size=256, shuffle=True, num_workers=4)",
    ): _TORCH
    + (
        "from torch.utils.data import DataLoader\n"
        "dataset = [(torch.randn(16), torch.randn(1)) for _ in range(512)]\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x, y):\n"
        "        return super().forward(x)\n"
        "model = Model(16, 1)\n"
        "model = autoparallel.parallelize(\n"
        "    model, example_batch=[torch.empty(256, 16), torch.empty(256, 1)])\n"
        "loss_fn = lambda out, batch: torch.nn.functional.mse_loss(out, batch[1])\n"
    ),
    (
        "docs/checkpoints.md",
        'model = autoparallel.parallelize(Net(), example_batch=batch, weights="weights.pt")',
    ): (_NET + 'torch.save(Net().state_dict(), "weights.pt")\n'),
    ("docs/checkpoints.md", 'model = transformers.AutoModelForCausalLM.from_pretrained("tuned")'): (
        "import transformers\n"
    ),
    (
        "docs/reports.md",
        'plan = autoparallel.plan("examples/gpt.py", cluster="8xH100", global_batch=64)',
    ): "import autoparallel\n",
    ("docs/scripts.md", "model = GPT(config)"): _GPT,
    ("docs/scripts.md", "with model.unsharded():  # whole weights on every rank"): _GPT
    + (
        "import os\n"
        "rank, prompt = int(os.environ.get('RANK', 0)), x[:1]\n"
        "model = autoparallel.parallelize(GPT(config), example_batch=(x, y))\n"
    ),
    (
        "docs/scripts.md",
        "discriminator = autoparallel.parallelize(discriminator, example_batch=(images,))",
    ): _TORCH
    + (
        "images, observations = torch.randn(8, 16), torch.randn(8, 16)\n"
        "actions = torch.randint(4, (8,))\n"
        "discriminator = torch.nn.Linear(16, 1)\n"
        "class Agent(torch.nn.Linear):\n"
        "    def act(self, observations, actions):\n"
        "        return self(observations).log_softmax(1).gather(1, actions[:, None])\n"
        "    def value(self, observations):\n"
        "        return self(observations).mean(1)\n"
        "agent = Agent(16, 4)\n"
    ),
    ("docs/scripts.md", "from autoparallel import whole"): _LLAMA
    + ("batch = {'input_ids': rows[:8], 'labels': rows[:8]}\n"),
    ("docs/scripts.md", "model = autoparallel.parallelize(model, example_batch=batch)"): _LLAMA
    + (
        "data = [{'input_ids': row, 'labels': row} for row in rows]\n"
        "resume = None\n"
        "batch = {'input_ids': rows[:8], 'labels': rows[:8],\n"
        "         'num_items_in_batch': torch.tensor(100)}\n"
    ),
    ("docs/training.md", "class Report(autoparallel.Callback):"): _TORCH,
    ("docs/training.md", "import torch, autoparallel"): _NET,
    (
        "docs/training.md",
        "step = autoparallel.Step(model, callbacks=lambda: "
        '[autoparallel.JsonLines("metrics.jsonl")])',
    ): _MODEL,
}
