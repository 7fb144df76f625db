"""Configuration, tokenizer and weights of the model to train: the built-in `tiny`, a folder or a hub name."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from longctx.model.allow_list import ADDED_IN, MULTIMODAL_MODELS
from longctx.model.config_file import (
    BOUNDS,
    check_config_numbers,
    check_config_values,
    check_model_folder,
    check_own_code,
    check_tokenizer_files,
    read_config_file,
    try_config,
    try_tokenizer,
)
from longctx.model.files import check_no_adapter, check_weight_files, on_meta
from longctx.model.multimodal import load_text_part, takes_text_alone, text_part
from longctx.model.quantized import parameter_sizes
from longctx.model.saving import generation_config_to_load, keep_generation_config
from longctx.model.tied_head import untie_as_stored
from longctx.model.tiny import TINY, tiny_config, tiny_model, tiny_tokenizer
from longctx.untrusted.confined import confined
from longctx.upstream.transformers_internals import (
    ON_META,
    drop_values,
    forget_implementations,
    needs_whole_weights,
    tied_weights,
    unpartitioned,
    without_values,
)


def load_config(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False, **overrides: Any
) -> PretrainedConfig:
    """The model's configuration; no weights are read. Of a multimodal model it is the text part's.

    Args:
        overrides: keys of the configuration with other values.

    Raises:
        ValueError: if there is no such model, with what was looked for, or no such key, or a model of its own code.
    """
    if name == TINY:
        config = tiny_config()
        overrides = _checked(config, overrides)
        config.update(overrides)
        return config
    config = _read_config(name, revision=revision, trust_remote_code=trust_remote_code)
    with _config_errors(name):
        text = text_part(config)
    overrides = _checked(text or config, overrides)
    if text is not None:
        config = type(text).from_dict(text.to_dict() | overrides)
        config.name_or_path = name
    elif overrides:  # from the start, so that the config's own checks see them
        config = _read_config(name, revision=revision, trust_remote_code=trust_remote_code, **overrides)
    return config


def _read_config(name: str, *, revision: str | None, trust_remote_code: bool, **overrides: Any) -> PretrainedConfig:
    """Read config.json, of which nothing is acted on before it has been checked."""
    check_model_folder(name)
    with _config_errors(name):
        values = read_config_file(name, revision)
    if trust_remote_code:
        check_own_code(name, values)
    check_config_values(name, values)
    _check_release(name, values)
    try_config(name, values)
    with _config_errors(name):
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False, **overrides)
    forget_implementations(config)
    return config


def _check_release(name: str, values: Mapping[str, Any]) -> None:
    """Refuse a model type that is supported with a later transformers than the installed one."""
    model_type = values.get("model_type")
    if isinstance(model_type, str) and model_type in ADDED_IN and model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"--model_name_or_path {name}: its model type is {model_type!r}, which transformers has from "
            f"{ADDED_IN[model_type]} on, and {transformers.__version__} is installed. Upgrade transformers: pip "
            "install -U transformers."
        )


@contextmanager
def _config_errors(name: str) -> Iterator[None]:
    """Name the model in whatever transformers makes of its config.json."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model_name_or_path {name} is neither a folder with the config.json of a model that this transformers "
            f"knows, nor a hub model that can be reached, nor the built-in {TINY!r}: {error}"
        ) from error
    except StrictDataclassError as error:
        raise ValueError(f"--model_name_or_path {name}: its config.json contradicts itself: {error}") from error
    except Exception as error:  # values of types that its code does not expect
        raise ValueError(
            f"--model_name_or_path {name}: its config.json cannot be used: {error} ({type(error).__name__}). Correct "
            "the file, or download it again."
        ) from error


def _checked(config: PretrainedConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys to set, with those that follow from them: fewer layers are the model's first ones.

    Raises:
        ValueError: for a key that the configuration does not have, and for more layers than the model has.
    """
    for key in overrides:
        if not hasattr(config, key):
            close = difflib.get_close_matches(key, vars(config), n=3)
            meant = f" Did you mean {' or '.join(close)}?" if close else ""
            raise ValueError(
                f"--model_init_kwargs sets {key}, which a {config.model_type} configuration does not have.{meant} "
                "Only keys of the model's config.json can be set."
            )
    num_layers = overrides.get("num_hidden_layers")
    of_layers = {} if num_layers is None else first_layers(config, num_layers)
    check_config_numbers("--model_init_kwargs", overrides)
    return {**of_layers, **overrides}


def _is_derived(config: PretrainedConfig, key: str) -> bool:
    """Whether a configuration computes the values of a key itself, as Bamba's does for the kinds of layers."""
    return isinstance(getattr(type(config), config.attribute_map.get(key, key), None), property)


PER_LAYER_KEYS = ("layer_rope_theta", "layer_types", "mlp_layer_types", "no_rope_layers")
"""The keys of a configuration that are lists with one value for each layer."""


def first_layers(config: PretrainedConfig, num_layers: int) -> dict[str, Any]:
    """Return the keys, with their values, that reduce a decoder's configuration to its first layers.

    Raises:
        ValueError: unless the model has at least so many layers.
    """
    if not isinstance(num_layers, int) or not 1 <= num_layers <= config.num_hidden_layers:
        raise ValueError(
            f"num_hidden_layers is set to {num_layers!r}, and the model has weights for {config.num_hidden_layers} "
            f"layers. Use 1 to {config.num_hidden_layers}."
        )
    derived = [key for key in PER_LAYER_KEYS if _is_derived(config, key)]  # from the number of layers
    lists = {key: getattr(config, key, None) for key in PER_LAYER_KEYS if key not in derived}
    return {"num_hidden_layers": num_layers} | {key: values[:num_layers] for key, values in lists.items() if values}


def load_tokenizer(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer that goes with the model, with a pad token (its own, else the end-of-text token).

    Raises:
        ValueError: if the model has none.
    """
    if name == TINY:
        return tiny_tokenizer()
    check_model_folder(name)
    try:
        tokenizer = _read_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # damage shows as any error of the code that meets it
        raise ValueError(
            f"--model_name_or_path {name} has no tokenizer that can be loaded. Put the tokenizer's files "
            f"(tokenizer.json, tokenizer_config.json) beside its config.json: {error}"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers' answer to a folder without its files
        raise ValueError(
            f"--model_name_or_path {name} has no tokenizer: transformers finds {len(tokenizer)} special tokens and no "
            f"others there. Put the tokenizer's files (tokenizer.json, tokenizer_config.json) beside its config.json."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _read_tokenizer(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
    """Load a tokenizer, once it is known that this comes to an end."""
    check_tokenizer_files(name, revision)
    load = partial(AutoTokenizer.from_pretrained, name, revision=revision, trust_remote_code=trust_remote_code)
    try_tokenizer(load)
    return load()


def check_eos_token(tokenizer: Tokenizer) -> None:
    """Check that the end-of-text token, where there is one, is one token that no ordinary text holds.

    Otherwise documents would have no end: text that happens to end like this token gets none, and each such letter of a
    text would become one.

    Raises:
        ValueError: with the token.
    """
    token, number = tokenizer.eos_token, tokenizer.eos_token_id
    if token is None:  # chats end as their template says, and text is refused later
        return
    if len(token) < 2 or all(character.isalnum() or character.isspace() for character in token):
        reason = "which ordinary text holds" if token else "which is empty"
    else:
        try:
            ids = confined(lambda: tokenizer(f"a{token}", add_special_tokens=False)["input_ids"], BOUNDS)
        except Exception as error:  # damage shows as any error of the code that meets it
            reason = f"which the tokenizer cannot encode ({error})"
        else:
            if ids[-1:] == [number]:
                return
            reason = f"which the tokenizer splits into other tokens than its number, {number}"
    raise ValueError(
        f"The tokenizer's EOS token is {token[:80]!r}, {reason}: documents would have no end. Name its end-of-text "
        "token with --eos_token, or correct tokenizer_config.json."
    )


def take_chat_template(tokenizer: Tokenizer, name: str) -> None:
    """Give it the chat template and end-of-text token of another tokenizer, as trl.clone_chat_template does.

    The model's embeddings stay as they are: one that lacks some is for TRL's function, before it comes here.

    Raises:
        ValueError: if there is no such tokenizer, it has no template, or tokens of it have no number here.
    """
    check_model_folder(name, "--chat_template_path")
    try:
        source = _read_tokenizer(name)
    except Exception as error:  # damage shows as any error of the code that meets it
        raise ValueError(
            f"--chat_template_path {name} is not a tokenizer that can be loaded. Name a .jinja file, or a tokenizer's "
            f"folder or name on the hub: {error}"
        ) from error
    if not source.chat_template:
        raise ValueError(f"--chat_template_path {name}: that tokenizer has no chat template. Name another.")
    wanted = [*(token.content for token in source.added_tokens_decoder.values()), source.eos_token]
    known = tokenizer.get_vocab()
    if missing := [token for token in wanted if token is not None and token not in known]:
        raise ValueError(
            f"--chat_template_path {name} has {len(missing)} tokens that the model's tokenizer lacks, such as "
            f"{missing[0]!r}, and embeddings are not added here. Add them with trl.clone_chat_template and save the "
            "model, or name a .jinja file of the template alone."
        )
    tokenizer.chat_template = source.get_chat_template()
    if source.eos_token is not None:
        tokenizer.eos_token = source.eos_token


def load_whole_config(name: str, *, revision: str | None = None) -> PretrainedConfig | None:
    """The configuration of a multimodal model of which the text part is trained, with all of its parts; else None."""
    if name == TINY or read_config_file(name, revision).get("model_type") not in MULTIMODAL_MODELS:
        return None
    return _read_config(name, revision=revision, trust_remote_code=False)


def load_model(
    name: str,
    config: PretrainedConfig,
    *,
    dtype: str = "float32",
    revision: str | None = None,
    quantization: BitsAndBytesConfig | None = None,
    has_values: bool = True,
) -> PreTrainedModel:
    """The weights, for training, with a configuration of their own. Attention is put in place afterwards.

    Args:
        has_values: whether to read weights and saved buffers. Without, they are on the meta device, and whatever else
            may be wrong with the model is found all the same.

    Raises:
        ValueError: if there are no weights, some are missing, or a file of them is damaged, of another model, or holds
            more than tensors.
    """
    config = copy.deepcopy(config)
    if name == TINY:
        assert quantization is None, "refused by check_quantization"
        return tiny_model(dtype=torch.float32 if dtype == "auto" else getattr(torch, dtype), config=config)
    check_no_adapter(name, revision)
    whole_config = load_whole_config(name, revision=revision)
    if whole_config is not None and takes_text_alone(whole_config):
        whole_config = None
    check_weight_files(name, whole_config or config, revision=revision)
    given: dict[str, Any] = {} if quantization is None else {"quantization_config": quantization}
    generation = generation_config_to_load(name, config, revision)
    try:
        untie_as_stored(config, name, revision=revision, load=True)
        with nullcontext() if has_values else without_values():
            if not has_values:
                given, generation = {**given, **ON_META}, {**generation, **ON_META}
            if whole_config is not None:
                model, found = load_text_part(
                    name, whole_config, config, dtype=dtype, revision=revision, generation=generation, **given
                )
            else:
                options = {"dtype": dtype, "revision": revision, **given, **generation}
                with unpartitioned() if needs_whole_weights(config) else nullcontext():
                    model, found = AutoModelForCausalLM.from_pretrained(
                        name, config=config, output_loading_info=True, **options
                    )
    except UnpicklingError as error:
        raise ValueError(
            f"--model_name_or_path {name}: pytorch_model.bin is damaged or holds more than tensors, such as code, and "
            "is not read. Name a model with model.safetensors, or, if you trust this one, save it as that."
        ) from error
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # damage shows as any error of the code that meets it
        if "allocate memory" in str(error):
            raise
        raise ValueError(
            f"The weights of --model_name_or_path {name} cannot be read: {str(error).rstrip('.')}. Complete the "
            "folder, or download it again."
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"--model_name_or_path {name} has no weights for {len(missing)} parameters of a {config.model_type} model, "
            f"such as {missing[0]}; they would be initialised at random. {_remedy_for_missing(model, missing)}"
        )
    keep_generation_config(model, name, revision)
    _freeze_as_declared(model)
    if not has_values:
        drop_values(model)
    model.tie_weights()  # FSDP2's ranks but the first have compared no values, and left apart what the first has tied
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # bitsandbytes' 4-bit layers, on CPUs that have it:
            module.support_avx512bf16_for_cpu = False  # an evaluation would round them to bf16, and leave them so
    return model


def _freeze_as_declared(model: PreTrainedModel) -> None:
    """Freeze what the model's class declares as not trained: `from_pretrained` gives every weight a gradient.

    The loss does not reach such a parameter, and DistributedDataParallel then fails: see the router of ERNIE 4.5.
    """
    declared = dict(on_meta(type(model), model.config).named_parameters())
    for name, parameter in model.named_parameters():
        if name in declared and not declared[name].requires_grad:
            parameter.requires_grad_(False)


def _remedy_for_missing(model: PreTrainedModel, missing: list[str]) -> str:
    if set(missing) <= tied_weights(model):
        return (
            "If the model's head is tied to its embeddings, pass --model_init_kwargs "
            "'{\"tie_word_embeddings\": true}' or set it in config.json."
        )
    return "Complete the folder, or download it again."


def count_parameters(model: torch.nn.Module) -> int:
    """Parameters of the whole model, each once; ZeRO-3 with zero3_init_flag leaves a rank with empty ones."""
    return sum(size for _, size in parameter_sizes(model))


def count_trained_parameters(model: torch.nn.Module) -> int:
    """Count the parameters that are not frozen."""
    return sum(size for parameter, size in parameter_sizes(model) if parameter.requires_grad)
