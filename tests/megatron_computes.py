"""Models that are written for megatron-core, and what it computes of them in a process of its own.

Nothing that reads or writes checkpoints in that process is ours (megatron_loads.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
import warm

from shardwright.ckpt import reshard


class Computed:
    """Models as transformers saves them, written for megatron-core, and what both compute."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.jobs = folder, []
        self.logits: dict[str, torch.Tensor] = {}
        made = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(64, (2, 24), generator=made)
        torch.save({"tokens": self.tokens}, folder / "tokens.pt")

    def model(self, name: str, said: dict[str, Any]) -> Path:
        """transformers' own folder; its logits are kept."""
        folder = self.folder / name
        torch.manual_seed(3)
        config = transformers.AutoConfig.for_model(**json.loads(json.dumps(said)))
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases too
                parameter.add_(torch.randn_like(parameter) * 0.1)
            self.logits[name] = model(self.tokens).logits
        model.save_pretrained(folder)
        return folder

    def write(self, name: str, to: str, tp: int = 1, pp: int = 1) -> None:
        """The model in a format and layout, to be loaded later."""
        out = self.folder / f"{name}, {to} {tp} {pp}"
        layout = {} if to == "torch_dist" else {"tp": tp, "pp": pp}
        reshard(self.folder / name, out, to=to, make_vocab_size_divisible_by=1, **layout)
        self.jobs.append({
            "name": f"loaded {len(self.jobs)}", "model": name, "kind": to,
            "folder": str(out / "release"), "layout": {"tp": tp, "pp": pp, "dp": 1, "vpp": 1},
            "optimizer": None, "fused_adam": False, "vocab": None, "by_name": True,
            "tokens": str(self.folder / "tokens.pt"), "logits_only": True,
        })  # fmt: skip

    def differing(self) -> list[str]:
        """What megatron-core computes otherwise than transformers, by more than rounding."""
        (self.folder / "jobs.json").write_text(json.dumps(self.jobs))
        log, jobs = self.folder / "log", self.folder / "jobs.json"
        code = warm.call("megatron_loads:main", str(jobs), str(self.folder), log=log)
        said = [path.read_text() for path in self.folder.glob("loaded */rank_*.txt")]
        assert said == []
        assert code == 0, log.read_text()[-3000:]
        return [text for job in self.jobs if (text := self._difference(job))]

    def _difference(self, job: dict[str, Any]) -> str:
        ranks = [torch.load(p, weights_only=True)["logits"]
                 for p in (self.folder / job["name"]).glob("rank_*.pt")]  # fmt: skip
        wanted = self.logits[job["model"]]
        found = [logits for logits in ranks if logits is not None]
        assert len(found) == job["layout"]["tp"]
        most = max((logits - wanted).abs().max().item() for logits in found)
        close = most < 1e-5 * wanted.abs().max().item()
        return "" if close else f"{Path(job['folder']).parent.name}: {most} apart"
