"""libmtmd's C interface through ctypes: llama.cpp's own vision towers."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint32, c_void_p
from functools import cache

from hetrun.backends.llamacpp import ggml_api, libllama_api
from hetrun.errors import BackendUnavailable
from hetrun.system.native_library import Prototypes

TEXT, IMAGE = 0, 1  # kinds of pieces
FLASH = 1  # attention that never has a whole matrix of scores, as llama-server computes it on a CPU
Heard = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)


class MtmdContextParams(Structure):
    """struct mtmd_context_params."""

    _fields_ = (
        ("use_gpu", c_bool),
        ("device", c_void_p),
        ("print_timings", c_bool),
        ("n_threads", c_int),
        ("image_marker", c_char_p),
        ("media_marker", c_char_p),
        ("flash_attn_type", c_int),
        ("warmup", c_bool),
        ("image_min_tokens", c_int),
        ("image_max_tokens", c_int),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("batch_max_tokens", c_int32),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
    )


class InputText(Structure):
    """struct mtmd_input_text."""

    _fields_ = (
        ("text", c_char_p),
        ("text_len", c_size_t),
        ("add_special", c_bool),
        ("parse_special", c_bool),
    )


class InputPart(Structure):
    """struct mtmd_input_part: a text or a picture."""

    _fields_ = (("text", POINTER(InputText)), ("bitmap", c_void_p))


class DecoderPosition(Structure):
    """struct mtmd_decoder_pos."""

    _fields_ = (("t", c_uint32), ("x", c_uint32), ("y", c_uint32), ("z", c_uint32))


PROTOTYPES: Prototypes = {
    "mtmd_log_set": (None, c_void_p, c_void_p),
    "mtmd_default_marker": (c_char_p,),
    "mtmd_context_params_default": (MtmdContextParams,),
    "mtmd_init_from_file": (c_void_p, c_char_p, c_void_p, MtmdContextParams),
    "mtmd_free": (None, c_void_p),
    "mtmd_support_vision": (c_bool, c_void_p),
    "mtmd_decode_use_non_causal": (c_bool, c_void_p, c_void_p),
    "mtmd_decode_use_mrope": (c_bool, c_void_p),
    "mtmd_bitmap_init": (c_void_p, c_uint32, c_uint32, c_char_p),
    "mtmd_bitmap_free": (None, c_void_p),
    "mtmd_input_chunks_init": (c_void_p,),
    "mtmd_input_chunks_size": (c_size_t, c_void_p),
    "mtmd_input_chunks_get": (c_void_p, c_void_p, c_size_t),
    "mtmd_input_chunks_free": (None, c_void_p),
    "mtmd_input_chunk_get_type": (c_int, c_void_p),
    "mtmd_input_chunk_get_tokens_text": (POINTER(c_int32), c_void_p, POINTER(c_size_t)),
    "mtmd_input_chunk_get_tokens_image": (c_void_p, c_void_p),
    "mtmd_input_chunk_get_n_tokens": (c_size_t, c_void_p),
    "mtmd_input_chunk_get_n_pos": (c_int32, c_void_p),
    "mtmd_tokenize_from_parts": (c_int32, c_void_p, c_void_p, POINTER(POINTER(InputPart)), c_size_t, c_bool),
    "mtmd_helper_image_get_decoder_pos": (None, c_void_p, c_int32, POINTER(DecoderPosition)),
    "mtmd_encode_chunk": (c_int32, c_void_p, c_void_p),
    "mtmd_get_output_embd": (POINTER(c_float), c_void_p),
}


@cache
def library() -> ctypes.CDLL:
    """libmtmd, loaded once, its log kept off stderr."""
    libllama_api.library()  # what it needs, of a version that we know
    lib = ggml_api.load_beside("libmtmd.so", PROTOTYPES)
    _check_layout(lib)
    lib.mtmd_log_set(ggml_api.libc_address("abs"), None)
    return lib


def _check_layout(lib: ctypes.CDLL) -> None:
    """The structure is passed by value: the defaults must lie where we read them."""
    p = lib.mtmd_context_params_default()
    found = (p.use_gpu, p.print_timings, p.warmup, p.image_min_tokens, p.image_max_tokens, p.batch_max_tokens)
    if found != (True, True, True, -1, -1, 1024) or p.media_marker != lib.mtmd_default_marker():
        raise BackendUnavailable(
            f"{lib._name} has other structures than the tested versions; {ggml_api.INSTALL}"
        )
