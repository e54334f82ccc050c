"""Rules about files: data, models and the user's own code exist, output folders can be written to."""

from __future__ import annotations

import ast
import difflib
import glob
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from verl.base.registry import suggest
from verl.base.remote import driver_problem, expand, is_remote, version
from verl.base.requirements import install_command
from verl.checkpoint.locate import shards_below
from verl.config import DPOConfig, EvalConfig, GenerationConfig, PPOConfig, Problem, ServeConfig, SupervisedConfig
from verl.datasets.files import SUFFIXES
from verl.errors import DataError
from verl.trainer.config.rules_sizes import needs_critic
from verl.utils.model_facts import model_files

if TYPE_CHECKING:
    from verl.config import TrainedModelConfig

Problems = Iterator[Problem]


def data_files(config: PPOConfig | SupervisedConfig) -> Problems:
    """Training and validation files exist and have a known format."""
    if config.data.custom_cls.path is not None:
        return  # a custom dataset class may read any format
    if not config.data.train_files:
        yield Problem("data.train_files", None, "there is nothing to train on", remedy="name at least one file")
    for key in ("train_files", "val_files"):
        for path in config.data[key] or ():
            yield from _data_file(f"data.{key}", path)
    both = {os.path.realpath(path) for path in config.data.train_files}.intersection(
        os.path.realpath(path) for path in config.data.val_files or ()
    )
    validates = config.trainer.test_freq > 0 or (isinstance(config, PPOConfig) and config.trainer.val_before_train)
    if both and validates:
        cause = "the run trains on this file too, so that validation shows what was learned by heart"
        yield Problem("data.val_files", sorted(both)[0], cause, remedy="hold rows out of training", advice=True)


def validation_files(config: PPOConfig) -> Problems:
    """A run that only validates has a file to validate on."""
    if config.trainer.val_only and not config.data.val_files:
        cause = "trainer.val_only=true does nothing else, and there is nothing to validate on"
        yield Problem("data.val_files", config.data.val_files, cause, remedy="name at least one file")


def generation_files(config: GenerationConfig) -> Problems:
    """The file of prompts exists, and the output file can be written."""
    if config.data.path is None:
        yield Problem("data.path", None, "it must be set", remedy="name the file of prompts")
    else:
        yield from _data_file("data.path", config.data.path)
    if config.data.output_path is None:
        yield Problem("data.output_path", None, "it must be set", remedy="name the file to write")
    else:
        if not config.data.output_path.endswith((".parquet", ".jsonl")):
            cause = "a file of this kind cannot be written"
            yield Problem("data.output_path", config.data.output_path, cause, "a name that ends in .parquet or .jsonl")
        yield from _folder("data.output_path", config.data.output_path.rpartition("/")[0] or ".")
        if config.data.path and os.path.realpath(config.data.path) == os.path.realpath(config.data.output_path):
            cause = "it is the file of prompts, which the responses would replace"
            yield Problem("data.output_path", config.data.output_path, cause, remedy="name another file")


def evaluation_files(config: EvalConfig) -> Problems:
    """The file of responses exists."""
    if config.data.path is None:
        yield Problem("data.path", None, "it must be set", remedy="name the file that main_generation wrote")
    else:
        yield from _data_file("data.path", config.data.path)


def models(config: PPOConfig | SupervisedConfig | GenerationConfig | ServeConfig) -> Problems:
    """Local folders of models and tokenizers exist; names on the hub are not checked."""
    ppo = isinstance(config, PPOConfig)
    model, prefix = (config.actor_rollout_ref.model, "actor_rollout_ref.model") if ppo else (config.model, "model")
    paths = {f"{prefix}.path": model.path}
    has_tokenizer = True  # as far as it is known: what is no model has none
    folders = {f"{prefix}.tokenizer_path": model.tokenizer_path, f"{prefix}.hf_config_path": model.hf_config_path}
    adapters = {f"{prefix}.lora_adapter_path": model.lora_adapter_path}
    if ppo and needs_critic(config):
        paths["critic.model.path"] = config.critic.model.path
        adapters["critic.model.lora_adapter_path"] = config.critic.model.lora_adapter_path
    if ppo and config.reward_model.enable:
        paths["reward_model.model.path"] = config.reward_model.model.path
    if ppo and config.distillation.enabled:
        for name, teacher in config.distillation.teachers.items():
            if teacher.model_path is not None and teacher.inference.name != "openai":
                paths[f"distillation.teacher_models.{name}.model_path"] = teacher.model_path
    for key, path in paths.items():
        problems = [*_model(key, path, "config.json", has_weights=True)]
        yield from problems
        has_tokenizer &= not problems or key != f"{prefix}.path"
    for key, path in folders.items():
        if path is not None and path not in paths.values():
            yield from _model(key, path, None)
    for key, path in adapters.items():
        if path is not None:
            yield from _adapters(key, path)
    if has_tokenizer or model.tokenizer_path is not None:
        yield from _tokenizer(prefix, model)


def reference(config: DPOConfig) -> Problems:
    """The local folder of the reference exists; a name on the hub is not checked."""
    if config.ref.path is not None:
        yield from model("ref.path", config.ref.path)


def model(key: str, path: str) -> Problems:
    """The local folder of a further model exists, and has weights; a name on the hub is not checked."""
    yield from _model(key, path, "config.json", has_weights=True)


def tokenizer(config: PPOConfig | SupervisedConfig) -> Problems:
    """The local folder of the tokenizer exists; no model is needed there."""
    ppo = isinstance(config, PPOConfig)
    model, prefix = (config.actor_rollout_ref.model, "actor_rollout_ref.model") if ppo else (config.model, "model")
    key = "path" if model.tokenizer_path is None else "tokenizer_path"
    yield from _model(f"{prefix}.{key}", model[key], None)
    yield from _tokenizer(prefix, model)


def own_code(config: PPOConfig | SupervisedConfig | EvalConfig) -> Problems:
    """Files of the user's own code exist and define the class or function that is named."""
    code_keys: list[tuple[str, str | None, str, str | None]] = []
    if isinstance(config, (PPOConfig, EvalConfig)):
        function = config.custom_reward_function
        code_keys.append(("custom_reward_function.path", function.path, "custom_reward_function.name", function.name))
    if isinstance(config, (PPOConfig, SupervisedConfig)):
        cls = config.data.custom_cls
        code_keys.append(("data.custom_cls.path", cls.path, "data.custom_cls.name", cls.name))
    if isinstance(config, PPOConfig):
        sampler, manager = config.data.sampler, config.reward_manager
        code_keys.append(("data.sampler.class_path", sampler.class_path, "data.sampler.class_name", sampler.class_name))
        datagen = config.data.datagen
        code_keys.append(("data.datagen.path", datagen.path, "data.datagen.name", datagen.name))
        if manager.source == "importlib":
            module = manager.module
            code_keys.append(("reward_manager.module.path", module.path, "reward_manager.name", manager.name))
            if module.path is None:
                remedy = "set it to the file of your class, or set reward_manager.source=register"
                yield Problem("reward_manager.module.path", None, "it must be set with source=importlib", remedy=remedy)
    for path_key, path, name_key, name in code_keys:
        if path is not None:
            yield from _code(path_key, path, name_key, name)


def output_folders(config: PPOConfig | SupervisedConfig) -> Problems:
    """Folders that the run writes to can be created and are writable."""
    trainer = config.trainer
    folders = {"trainer.default_local_dir": trainer.default_local_dir if trainer.saves else None}
    if isinstance(config, PPOConfig):
        folders["trainer.rollout_data_dir"] = config.trainer.rollout_data_dir
        folders["trainer.validation_data_dir"] = config.trainer.validation_data_dir
        rollout = config.actor_rollout_ref.rollout
        folders["actor_rollout_ref.rollout.skip_dump_dir"] = rollout.skip_dump_dir if rollout.skip_rollout else None
    for key, path in folders.items():
        if path is not None:
            yield from _folder(key, path)


def _data_file(key: str, path: str) -> Problems:
    if is_remote(path):
        yield from _remote(key, path)
        if not path.endswith(SUFFIXES):
            yield Problem(key, path, "the format is not known", ", ".join(SUFFIXES), "convert the file or rename it")
    elif not Path(path).exists() and (matches := sorted(glob.glob(path, recursive=True))):
        for name in matches:
            yield from _data_file(key, name)
    elif not Path(path).is_file():
        cause = "there is no such file" if not Path(path).is_dir() else "this is a folder, not a file"
        yield Problem(key, path, f"{cause} (looked in {Path(path).absolute().parent})", remedy=_data_remedy(path))
    elif not path.endswith(SUFFIXES):
        yield Problem(key, path, "the format is not known", ", ".join(SUFFIXES), "convert the file or rename it")


def _data_remedy(path: str) -> str:
    folder = Path(path).parent
    there = sorted(p.name for p in folder.iterdir() if p.suffix in SUFFIXES) if folder.is_dir() else []
    if near := difflib.get_close_matches(Path(path).name, there, n=1):
        return f"did you mean {folder / near[0]}?"
    if there:
        return f"the folder has {', '.join(there[:5])}"
    return "make it with one of examples/data_preprocess/*.py, or correct the path"


def _name_of_a_folder(key: str, path: str) -> Problems:
    """Refuse a path to nothing that resembles a folder here: it would be asked for on the hub."""
    parent = Path(path).parent
    if not parent.is_dir():
        return
    near = difflib.get_close_matches(Path(path).name, [child.name for child in parent.iterdir() if child.is_dir()], n=1)
    if near:
        cause = f"there is no such folder. Did you mean {parent / near[0]}?"
        remedy = "name the folder; a name that resembles none here is taken from the Hugging Face hub"
        yield Problem(key, path, cause, remedy=remedy)


def _is_local(path: str) -> bool:
    return path.startswith(("/", "./", "../", "~")) or Path(path).exists()


def _adapters(key: str, path: str) -> Problems:
    """A local folder of adapters is one of LoRA and has both files."""
    problems = [*_model(key, path, "adapter_config.json")]
    yield from problems
    folder = Path(path).expanduser()
    if problems or is_remote(path) or not _is_local(path):
        return
    try:
        kind = json.loads((folder / "adapter_config.json").read_text()).get("peft_type")
    except (ValueError, AttributeError) as error:
        yield Problem(key, path, f"its adapter_config.json cannot be read: {error}", remedy="mend the file")
        return
    if kind != "LORA":
        yield Problem(key, path, f"the folder holds adapters of kind {kind}", "those of kind LORA")
    elif not (folder / "adapter_model.safetensors").is_file():
        yield Problem(key, path, "the folder has no adapter_model.safetensors", remedy="save the adapters again")


def _model(key: str, path: str, must_have: str | None, has_weights: bool = False) -> Problems:
    folder = Path(path).expanduser()
    is_gguf = folder.suffix == model_files.GGUF
    if is_remote(path):
        yield from _remote(key, path, None if is_gguf else must_have)
    elif is_gguf:
        yield from _gguf(key, path, must_have)
    elif not _is_local(path):
        yield from _name_of_a_folder(key, path)
    elif not folder.is_dir():
        if key.endswith(".lora_adapter_path"):
            remedy = "name a folder that peft's save_pretrained wrote, or lora_adapter of a checkpoint"
        else:
            remedy = "name a folder that holds a model, or a model of the Hugging Face hub such as Qwen/Qwen3-0.6B"
        yield Problem(key, path, "there is no such folder", remedy=remedy)
    elif has_weights and (problem := _shards(key, path, folder)):
        yield problem
    elif must_have and not (folder / must_have).is_file():
        yield Problem(key, path, f"the folder has no {must_have}", remedy="name a folder in the Hugging Face format")
    elif has_weights and (cause := model_files.quantization_problem(folder)):
        yield Problem(key, path, cause, remedy=model_files.DEQUANTIZE)
    elif has_weights and (cause := model_files.weights_problem(folder)):
        yield Problem(key, path, cause, remedy="name the folder of a whole model")
    elif cause := model_files.file_problem(folder):
        yield Problem(key, path, cause, remedy="mend the file, or name another folder")


def _gguf(key: str, path: str, must_have: str | None) -> Problems:
    """A GGUF file is a whole model, which a run converts before it loads it."""
    if must_have == "adapter_config.json":
        yield Problem(key, path, "adapters are not read from GGUF", remedy="name a folder in peft's format")
    elif cause := model_files.gguf_problem(Path(path).expanduser()):
        yield Problem(key, path, f"the file {cause}", remedy="name a GGUF file, or a model folder")
    elif importlib.util.find_spec("gguf") is None:
        yield Problem(key, path, "it needs the package gguf, which is not installed", remedy=install_command("gguf"))


def _shards(key: str, path: str, folder: Path) -> Problem | None:
    """Return the problem of a folder of a checkpoint in place of a model's; None if it holds a model, or no shards."""
    if model_files.weights_problem(folder) is None:
        return None
    shards = shards_below(folder.parent if folder.name == "huggingface" else folder)
    if shards is None:
        return None
    model = shards / "huggingface"
    if model_files.weights_problem(model) is None:
        return Problem(key, path, "this is the folder of a checkpoint", remedy=f"its model is in {model}")
    remedy = f"verl merge {shards} --target_dir MODEL makes a model folder to name here; with hf_model in "
    remedy += "checkpoint.save_contents a run saves one at every step"
    return Problem(key, path, "these are the shards of a checkpoint, which must be merged first", remedy=remedy)


def _tokenizer(prefix: str, model: TrainedModelConfig) -> Problems:
    """The local folder of the tokenizer holds one; a damaged file of it is a problem of the folder."""
    key = "path" if model.tokenizer_path is None else "tokenizer_path"
    folder = Path(model[key]).expanduser()
    if _is_local(model[key]) and folder.is_dir() and (cause := model_files.tokenizer_problem(folder)):
        remedy = f"set {prefix}.tokenizer_path to a folder that holds it, or copy its files there"
        yield Problem(f"{prefix}.{key}", model[key], cause, remedy=remedy)


def _code(path_key: str, path: str, name_key: str, name: str | None) -> Problems:
    if name is None:
        yield Problem(name_key, None, f"it must be set with {path_key}", remedy=f"name what {path} holds")
    elif not path.endswith(".py"):
        return  # a module: imported, and checked, only where it is used
    elif not Path(path).is_file():
        folder = Path(path).parent
        files = sorted(file.name for file in folder.glob("*.py"))
        near = difflib.get_close_matches(Path(path).name, files, n=1)
        remedy = f"did you mean {folder / near[0]}?" if near else "give the path of a Python file, or a module"
        yield Problem(
            path_key, path, f"there is no such file (looked in {Path(path).absolute().parent})", remedy=remedy
        )
    else:
        names, functions, has_star = _names_in(Path(path))
        if name not in names and not has_star:
            cause = f"{path} does not define it.{suggest(name, sorted(names))}"
            allowed = f"functions and classes of that file: {', '.join(functions)}" if functions else ""
            yield Problem(name_key, name, cause, allowed, f"set {name_key} to a function or class of that file")


def _names_in(path: Path) -> tuple[set[str], list[str], bool]:
    """Return the names in a Python file, its public functions and classes, and whether it has a star import."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # ValueError: null bytes, in some versions of Python
        return set(), [], True  # no problem here: importing the file shows the error with its line
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    functions = [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    return names, functions, "*" in names


def _remote(key: str, url: str, must_have: str | None = None) -> Problems:
    """The driver of a remote file or folder is installed, it can be reached, and something is there."""
    if cause := driver_problem(url):
        yield Problem(key, url, cause, remedy="install the driver, or copy it to a local disk and name that")
        return
    try:
        for address in expand(url):
            version(address if must_have is None else f"{address.rstrip('/')}/{must_have}")
    except DataError as error:
        yield Problem(key, url, str(error).rstrip("."), remedy="correct the URL, or what the driver reads")


def _folder(key: str, path: str) -> Problems:
    if is_remote(path):
        remedy = "name a local folder; trainer.default_hdfs_dir gets copies of checkpoints"
        yield Problem(key, path, "a run writes to local folders", remedy=remedy)
        return
    try:
        os.makedirs(path, exist_ok=True)
        writable = os.access(path, os.W_OK)
        why = "it is not writable"
    except OSError as error:
        writable, why = False, f"the folder cannot be made ({error.strerror})"
    if not writable:
        yield Problem(key, path, why, remedy="choose a folder that you may write to")
