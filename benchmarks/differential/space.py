"""The space of cases: every dimension of a training run with its values, plain ones and unlucky ones."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import CONFIG_MAPPING

from longctx.attention.backend import Backend
from longctx.attention.backends import BACKENDS
from longctx.attention.cost import Setup
from longctx.machine.here import Machine
from longctx.model.allow_list import AUXILIARY_LOSS_MODELS, CAUSAL_MODELS, MODEL_TYPES, RECURRENT_MODELS, WINDOW_MODELS

from .values import ADAPTERS, PREFERENCES, SCHEDULES, UNLUCKY

ALWAYS_WINDOWED = (
    *(
        "afmoe",
        "cohere2",
        "cohere2_moe",
        "cwm",
        "exaone_moe",
        "flint",
        "gemma3_text",
        "gemma4_text",
        "gemma4_unified_text",
        "gpt_oss",
        "granitemoe_swa",
        "kolibri1",
        "ministral",
        "olmo3",
    ),
)
"""Model types whose configuration always has windows in some layers."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. The defaults are the plain values that shrinking goes back to."""

    seed: int = 0
    """Of weights and documents."""
    # The model.
    method: str = "sft"
    """sft, or `longctx dpo` with one of PREFERENCES."""
    share_prompts: bool = True
    """Of pairs of answers."""
    model: str = "qwen3"
    heads: str = "4:2"
    """Query heads : key/value heads."""
    head_dim: int = 8
    layers: int = 2
    vocab_size: int = 272
    embeddings: str = "untied"
    """tied, untied, or `contradictory`: config.json says tied and the file has a head of its own."""
    window: int = 0
    """Tokens of the sliding window; 0 for none where the type can do without."""
    file_dtype: str = "float32"
    rope_scaling: str = ""
    model_init_kwargs: str = ""
    # The data.
    records: str = "labels"
    documents: int = 6
    lengths: str = "mixed"
    masked: str = "front"
    tokens: str = "random"
    file: str = "jsonl"
    reading: str = "whole"
    """whole, stream, mixture, weighted, or streamed mixture."""
    overlong: str = "raise"
    max_length: int = 96
    packing: str = "bfd"
    """bfd, bfd_split, none or padding_free."""
    # The steps.
    order: str = "whole"
    """whole: every step takes all documents. sequential: steps take the next ones. random: in the run's own order."""
    steps: int = 2
    epochs: float = 0
    """0: --max_steps decides."""
    batch: int = 1
    accumulation: int = 1
    drop_last: bool = False
    # The layout.
    sp: int = 1
    backend: str = "auto"
    dp: int = 1
    dp_replicate: int = 1
    engine: str = "auto"
    """auto, fsdp2, deepspeed, or zero0 to zero3 as a launcher's profile sets them."""
    # The memory options.
    memory: str = "balanced"
    checkpointing: str = ""
    sequence_chunk_size: int = 0
    tiled_mlp: str = ""
    heads_k_stride: int = 0
    activation_offloading: bool = False
    offload: str = ""
    """optimizer or param."""
    loss_type: str = "nll"
    # The features.
    adapter: str = ""
    smoothing: float = 0.0
    aux_loss: float = 0.0
    """Coefficient of the routers' auxiliary loss."""
    evaluation: str = ""
    schedule: str = "linear"
    warmup: int = 0
    clipping: float = 1.0
    optimizer: str = "sgd"
    learning_rate: float = 0.2
    weight_decay: float = 0.0
    resume: str = ""
    """same, or the layout to go on with: one process, ring, ulysses, dp."""
    unlucky: str = ""
    """One more flag and its value, which may make no sense."""
    # The spelling.
    spelling: str = "flag"

    @property
    def processes(self) -> int:
        return self.sp * self.dp

    @property
    def reads_pairs(self) -> bool:
        return self.method != "sft"

    def to_json(self) -> str:
        """The dimensions that are not plain."""
        return json.dumps(self.changed())

    def changed(self) -> dict[str, Any]:
        """The dimensions that are not plain, by name."""
        plain = asdict(Case())
        return {name: value for name, value in asdict(self).items() if value != plain[name]}

    @classmethod
    def from_json(cls, text: str) -> Case:
        """The case that `to_json` has written."""
        return cls(**json.loads(text))


VALUES: dict[str, tuple[Any, ...]] = {
    "method": tuple(PREFERENCES),
    "share_prompts": (False,),
    "model": tuple(name for name in CAUSAL_MODELS if name in CONFIG_MAPPING),
    "heads": ("4:4", "4:1", "3:3", "5:1", "6:2", "7:7", "1:1", "8:2", "9:3"),
    "head_dim": (4, 6, 12, 16, 18, 32),
    "layers": (1, 3),
    "vocab_size": (263, 301, 320, 521),
    "embeddings": ("tied", "contradictory"),
    "window": (1, 2, 8, 24, 1000),
    "file_dtype": ("bfloat16",),
    "rope_scaling": (
        "yarn:4",
        "linear:2",
        "linear:3.5",
        "llama3:8",
        '{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32}',
    ),
    "model_init_kwargs": (
        '{"num_hidden_layers": 1}',
        '{"attention_dropout": 0.0}',
        '{"initializer_range": 0.5}',
        '{"max_position_embeddings": 4096}',
        '{"use_cache": false}',
    ),
    "records": ("input_ids", "text", "messages", "assistant", "prompt", "prompt, all learnt", "completion_mask"),
    "documents": (1, 2, 3, 9),
    "lengths": ("ones", "exact", "longer by one", "long", "short", "uneven", "window"),
    "masked": ("nothing", "nearly all", "some documents", "all but one token", "everything"),
    "tokens": ("pad and eos", "one token", "largest"),
    "file": ("json", "parquet", "arrow", "saved", "folder"),
    "reading": ("stream", "mixture", "weighted", "streamed mixture"),
    "overlong": ("truncate", "drop", "split"),
    "max_length": (17, 37, 64, 128, 200),
    "packing": ("bfd_split", "none", "padding_free"),
    "order": ("sequential", "random"),
    "steps": (1, 3, 5),
    "epochs": (1, 2, 1.5, 0.5),
    "batch": (2, 3),
    "accumulation": (2, 3),
    "drop_last": (True,),
    "sp": (2, 2, 2, 3, 4),
    "backend": tuple(BACKENDS.spread),
    "dp": (2, 2, 3, 4),
    "dp_replicate": (2,),
    "engine": ("fsdp2", "deepspeed", "zero0", "zero1", "zero2", "zero3"),
    "memory": ("longest", "fastest"),
    "checkpointing": ("True", "False", "every 2", "selective", "not selective", "reentrant"),
    "sequence_chunk_size": (1, 7, 16, 64),
    "tiled_mlp": ("True", "3", "1"),
    "heads_k_stride": (1, 2),
    "activation_offloading": (True,),
    "offload": ("optimizer", "param", "both"),
    "loss_type": ("chunked_nll",),
    "adapter": ADAPTERS,
    "smoothing": (0.1, 1.0),
    "aux_loss": (0.01, 1.0),
    "evaluation": ("steps", "epoch", "at the start", "best model", "early stopping", "packed otherwise"),
    "schedule": SCHEDULES[1:],
    "warmup": (1, 5),
    "clipping": (0.0, 0.01, 100.0),
    "optimizer": ("adamw_torch", "adamw_torch_fused", "rmsprop"),
    "learning_rate": (1e-3, 1.0),
    "weight_decay": (0.1,),
    "resume": ("same", "one process", "ring", "ulysses", "dp", "zero2"),
    "unlucky": UNLUCKY,
    "spelling": ("equals", "dashes", "yaml", "older names", "yaml and flags"),
}
"""The values of each dimension besides the plain one."""

NOT_OF_PAIRS = ("aux_loss", "loss_type", "masked", "tokens")
"""Dimensions that pairs of answers do not have."""

LAUNCHERS = ("python -m longctx.train", "accelerate launch", "torchrun", "--accelerate_config", "longctx train")
"""Spellings that go through the real command line. They take 15 to 30 seconds."""

REFUSED_SHARE = 0.12
"""Of random cases, those in which settings stay together that are known to be refused."""
TEXT_RECORDS = ("text", "messages", "assistant", "prompt", "prompt, all learnt")


def draw(seed: int, *, launchers: float = 0.02) -> Case:
    """A random case: about a quarter of the dimensions are not plain.

    Args:
        launchers: the share of cases that go through a real command line.
    """
    random_ = random.Random(seed)
    case = Case(seed=seed)
    rates = {"model": 0.75, "sp": 0.65, "dp": 0.35, "backend": 0.8, "engine": 0.5, "unlucky": 0.12, "resume": 0.12}
    rates |= {"records": 0.5, "lengths": 0.6, "packing": 0.4, "adapter": 0.15, "evaluation": 0.15, "order": 0.5}
    rates |= {"model_init_kwargs": 0.05, "rope_scaling": 0.08, "window": 0.5, "memory": 0.08, "offload": 0.08}
    rates |= {
        "method": 0.1,
        "aux_loss": 0.5,
        "heads_k_stride": 0.08,
        "overlong": 0.6,
        "drop_last": 0.06,
        "epochs": 0.12,
    }
    for name, values in VALUES.items():
        if random_.random() < rates.get(name, 0.15):
            case = replace(case, **{name: random_.choice(values)})
    if random_.random() < launchers:
        case = replace(case, spelling=random_.choice(LAUNCHERS))
    return make_consistent(case if random_.random() < REFUSED_SHARE else reconcile(case, random_))


def reconcile(case: Case, random_: random.Random) -> Case:
    """Take out of a case what is known to be refused side by side, so that most cases train."""
    change: dict[str, Any] = {}
    backend = BACKENDS[case.backend] if case.backend != "auto" else None
    on_fsdp2 = case.engine == "fsdp2" or (case.engine == "auto" and (backend is None or backend.engine == "fsdp2"))
    if case.dp_replicate > 1 and (case.processes != 4 or case.dp % 2 or not on_fsdp2):
        change["dp_replicate"] = 1
    if case.engine == "zero0":
        change["engine"] = "zero1"
    if backend is not None and case.sp > 1 and not spreads(backend, case):
        change["backend"] = random_.choice([name for name, other in BACKENDS.spread.items() if spreads(other, case)])
    if case.model in RECURRENT_MODELS:
        change["sequence_chunk_size"] = 0
    if case.sequence_chunk_size and (backend is None or not backend.can_chunk or case.tiled_mlp or case.checkpointing):
        change["sequence_chunk_size"] = 0
    elif case.sequence_chunk_size == 1 and case.max_length > 37:
        change["sequence_chunk_size"] = 7  # blocks of one token are thousands, and take minutes
    if case.heads_k_stride and (case.sequence_chunk_size or backend is None or not backend.has_stages):
        change["heads_k_stride"] = 0
    if case.offload and (case.processes == 1 or case.engine in ("zero1", "zero2")):
        change["offload"] = ""
    elif case.offload and on_fsdp2:
        change["offload"] = "param"
    if case.adapter == "head" and on_fsdp2:
        change["adapter"] = "norm"
    if case.adapter in ("embeddings", "head") and case.embeddings != "untied":
        change["adapter"] = "lora"
    if case.overlong == "raise" and case.lengths in ("longer by one", "long"):
        change["overlong"] = random_.choice(("truncate", "drop", "split"))
    if case.evaluation in ("best model", "early stopping") and case.resume:
        change["evaluation"] = "steps"
    return replace(case, **change)


def spreads(backend: Backend, case: Case) -> bool:
    """Whether a backend spreads the heads of a case over its sp ranks, which are at least 2."""
    num_heads, num_key_value_heads = map(int, case.heads.split(":"))
    setup = Setup(
        sp=case.sp,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        head_size=case.head_dim,
        element_size=4,
        machine=Machine.of("CPU", case.sp),
    )
    try:
        return bool(backend.arrange(setup, None))
    except ValueError:
        return False


def make_consistent(case: Case) -> Case:
    """Bring together what has no meaning, or no independent account, side by side; refusals are left to longctx."""
    change: dict[str, Any] = {}
    if case.processes > 4:
        change["dp"] = 1
    if case.sp * change.get("dp", case.dp) == 1 and case.engine not in ("auto", "zero2", "zero3"):
        change["engine"] = "auto"
    if case.window and case.model not in WINDOW_MODELS:
        change["window"] = 0
    if case.aux_loss and case.model not in AUXILIARY_LOSS_MODELS:
        change["aux_loss"] = 0.0
    elif case.aux_loss and case.order == "random":  # documents are found by their loss alone
        change["order"] = "whole"
    if case.model in ALWAYS_WINDOWED and not case.window:
        change["window"] = 8
    if MODEL_TYPES[case.model].recurrence == "gated delta" and case.heads not in ("4:2", "4:4", "8:2"):
        change["heads"] = "4:2"
    if case.model == "olmo_hybrid" and case.layers == 1:
        change["layers"] = 2  # one of each kind
    if case.reads_pairs:
        change |= _of_pairs(case)
    elif not case.share_prompts:
        change["share_prompts"] = True
    if case.records in TEXT_RECORDS and case.max_length < 64:
        change["max_length"] = 96
    if case.records != "labels":
        change |= {"masked": "front"}
    if case.records in TEXT_RECORDS:
        change |= {"tokens": "random"}
    if case.order == "sequential" and case.packing not in ("none", "padding_free"):
        change["packing"] = "none"
    if case.order == "random" and "stream" in case.reading and case.packing in ("none", "padding_free"):
        change["order"] = "sequential"
    if case.order != "sequential" and "stream" in case.reading and case.overlong == "split":
        change["overlong"] = "truncate"  # a step takes one pack from a lane, and a lane has all pieces of a document
    if case.optimizer != "sgd" and case.learning_rate > 0.01:
        change["learning_rate"] = 1e-3
    if case.resume and (case.steps < 2 or case.epochs):
        change |= {"steps": 3, "epochs": 0}
    if case.epochs and "stream" in case.reading:
        change["epochs"] = 0
    if case.resume and case.evaluation == "at the start":
        change["evaluation"] = "steps"
    if case.evaluation == "epoch" and (case.order == "random" or "stream" in case.reading):
        change["evaluation"] = "steps"
    if case.drop_last and case.order == "whole":
        change |= {"order": "sequential"}
    if case.file == "folder" and case.records != "text":
        change["records"] = "text"
    consistent = replace(case, **change)
    return case if consistent == case else make_consistent(consistent)


def _of_pairs(case: Case) -> dict[str, Any]:
    """What of a case has another meaning for pairs of answers, or none."""
    plain = Case()
    change: dict[str, Any] = {name: getattr(plain, name) for name in NOT_OF_PAIRS}
    change["records"] = "messages" if case.records in ("messages", "assistant") else "prompt"
    change["overlong"] = "truncate" if case.overlong == "split" else case.overlong
    if case.file == "folder":
        change["file"] = plain.file
    if "stream" in case.reading:
        change["reading"] = "mixture" if "mixture" in case.reading else "whole"
    if case.packing == "bfd_split":
        change["packing"] = "bfd"
    windowed = case.window or case.model in ALWAYS_WINDOWED
    hinders = windowed or case.model in RECURRENT_MODELS or MODEL_TYPES[case.model].chunks or case.sequence_chunk_size
    if change["overlong"] != "raise" and (hinders or case.memory == "longest"):
        change["share_prompts"] = False  # where prompts may count twice, it is not known here which pairs are too long
    if case.smoothing >= 0.5:
        change["smoothing"] = 0.1  # more would call most preferences wrong
    return change
