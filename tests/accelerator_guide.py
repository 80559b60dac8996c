"""The guide's script: ``accelerator_guide.py PLUGIN_FIELDS PRECISION FOLDER``, under any launcher.

The fields (JSON) replace some of the guide's, and the losses are left in FOLDER.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from shardwright.train import Accelerator, MegatronLMPlugin

fields, precision, folder = json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
guides = {
    "tp_degree": 2, "pp_degree": 2, "num_micro_batches": 4, "gradient_clipping": 1.0,
    "sequence_parallelism": False, "recompute_activations": True, "use_distributed_optimizer": True,
}  # fmt: skip
plugin = MegatronLMPlugin(**{**guides, **fields})
accelerator = Accelerator(
    mixed_precision=precision, gradient_accumulation_steps=8, megatron_lm_plugin=plugin
)
config = json.loads((folder / "config.json").read_text())
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(**config))
ids = torch.load(folder / "ids.pt")
loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in ids])
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=6e-4), loader
)
losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
name = str(folder / f"checkpoint-epoch-0-{precision}-{accelerator.parallel.world_size}")
accelerator.wait_for_everyone()
accelerator.save_state(name)
accelerator.load_state(name)
if accelerator.is_main_process:
    (folder / f"{Path(name).name}.json").write_text(json.dumps(losses))
