"""libllama's C interface through ctypes: llama.cpp's own models and vocabularies."""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_size_t,
    c_uint32,
    c_void_p,
)
from functools import cache

from hetrun.backends.llamacpp import ggml_api
from hetrun.errors import BackendUnavailable
from hetrun.system.native_library import Prototypes

ABORTED, NO_ROOM = 2, 1  # what llama_decode answers
LOAD_READ, LOAD_MMAP = 0, 1


class ModelParams(Structure):
    """struct llama_model_params."""

    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class LlamaContextParams(Structure):
    """struct llama_context_params."""

    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int),
        ("rope_scaling_type", c_int),
        ("pooling_type", c_int),
        ("attention_type", c_int),
        ("flash_attn_type", c_int),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int),
        ("type_v", c_int),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class LlamaBatch(Structure):
    """struct llama_batch; its arrays belong to the caller."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", c_void_p),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", c_void_p),
    )


PROTOTYPES: Prototypes = {
    "llama_log_set": (None, c_void_p, c_void_p),
    "llama_model_default_params": (ModelParams,),
    "llama_model_load_from_file": (c_void_p, c_char_p, ModelParams),
    "llama_model_free": (None, c_void_p),
    "llama_model_has_encoder": (c_bool, c_void_p),
    "llama_model_is_recurrent": (c_bool, c_void_p),
    "llama_model_is_hybrid": (c_bool, c_void_p),
    "llama_model_n_swa": (c_int32, c_void_p),
    "llama_model_get_vocab": (c_void_p, c_void_p),
    "llama_vocab_n_tokens": (c_int32, c_void_p),
    "llama_vocab_bos": (c_int32, c_void_p),
    "llama_vocab_eos": (c_int32, c_void_p),
    "llama_vocab_sep": (c_int32, c_void_p),
    **{f"llama_vocab_fim_{kind}": (c_int32, c_void_p) for kind in ("pre", "suf", "mid", "pad", "rep", "sep")},
    "llama_vocab_get_add_bos": (c_bool, c_void_p),
    "llama_vocab_get_add_eos": (c_bool, c_void_p),
    "llama_vocab_get_attr": (c_int32, c_void_p, c_int32),
    "llama_vocab_is_eog": (c_bool, c_void_p, c_int32),
    "llama_tokenize": (c_int32, c_void_p, c_char_p, c_int32, c_void_p, c_int32, c_bool, c_bool),
    "llama_token_to_piece": (c_int32, c_void_p, c_int32, c_void_p, c_int32, c_int32, c_bool),
    "llama_context_default_params": (LlamaContextParams,),
    "llama_init_from_model": (c_void_p, c_void_p, LlamaContextParams),
    "llama_free": (None, c_void_p),
    "llama_decode": (c_int32, c_void_p, LlamaBatch),
    "llama_get_logits": (POINTER(c_float), c_void_p),
    "llama_get_memory": (c_void_p, c_void_p),
    "llama_memory_clear": (None, c_void_p, c_bool),
    "llama_memory_seq_rm": (c_bool, c_void_p, c_int32, c_int32, c_int32),
    "llama_memory_seq_cp": (None, c_void_p, c_int32, c_int32, c_int32, c_int32),
    "llama_memory_seq_pos_min": (c_int32, c_void_p, c_int32),
}

_REGISTRY: Prototypes = {
    "ggml_backend_reg_by_name": (c_void_p, c_char_p),
    "ggml_backend_register": (None, c_void_p),
}


@cache
def library() -> ctypes.CDLL:
    """libllama, loaded once, its log kept off stderr."""
    ggml = ggml_api.library()  # first, and its version is checked
    lib = ggml_api.load_beside("libllama.so", PROTOTYPES)
    registry = ggml_api.load_beside("libggml.so", _REGISTRY)
    if not registry.ggml_backend_reg_by_name(b"CPU"):  # it knows only what it was linked to
        registry.ggml_backend_register(ggml.ggml_backend_cpu_reg())
    _check_layout(lib)
    lib.llama_log_set(ggml_api.libc_address("abs"), None)
    return lib


def _check_layout(lib: ctypes.CDLL) -> None:
    """Structures are passed by value: the defaults must lie where we read them."""
    model, context = lib.llama_model_default_params(), lib.llama_context_default_params()
    found = (model.use_extra_bufts, context.n_batch, context.n_ubatch, context.type_k, context.swa_full)
    if found != (True, 2048, 512, ggml_api.F16, True) or context.ctx_other is not None:
        raise BackendUnavailable(
            f"{lib._name} has other structures than the tested versions; {ggml_api.INSTALL}"
        )
