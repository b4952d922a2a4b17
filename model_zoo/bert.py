"""BERT-base, uncased, encoder and pooler (Devlin et al., NAACL 2019): 12 layers, hidden 768, 12 heads, 128 tokens."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from .graph import Graph

TOKENS, HIDDEN, LAYERS, HEADS, INTERMEDIATE = 128, 768, 12, 12, 3072
VOCABULARY, POSITIONS, TYPES = 30522, 512, 2
EPSILON = 1e-12


def build(name: str) -> onnx.ModelProto:
    """input_ids, attention_mask and token_type_ids (int64 [1, 128]) to the last hidden state and the pooled first token."""
    graph = Graph(name)
    ids = graph.input("input_ids", (1, TOKENS), TensorProto.INT64)
    mask = graph.input("attention_mask", (1, TOKENS), TensorProto.INT64)
    types = graph.input("token_type_ids", (1, TOKENS), TensorProto.INT64)
    bias = _mask_to_bias(graph, mask)
    x = _embed(graph, ids, types)
    for layer in range(LAYERS):
        x = _layer(graph, x, f"encoder.layer.{layer}", bias, last=layer == LAYERS - 1)
    first = graph.node("Gather", [x, graph.constant("first", np.array(0, np.int64))], "/pooler/Gather", axis=1)
    weights = [graph.kernel("pooler.dense.weight", (HIDDEN, HIDDEN), HIDDEN), graph.bias("pooler.dense.bias", (HIDDEN,))]
    first = graph.node("Gemm", [first, *weights], "/pooler/dense/Gemm", transB=1)
    graph.node("Tanh", [first], "/pooler/activation/Tanh", "pooler_output")
    graph.output("last_hidden_state", (1, TOKENS, HIDDEN))
    graph.output("pooler_output", (1, HIDDEN))
    return graph.model()


def _mask_to_bias(graph: Graph, mask: str) -> str:
    """0 where the mask is 1, the lowest float where it is 0: [1, 1, 1, tokens]."""
    mask = graph.node("Unsqueeze", [mask, graph.constant("mask_axes", np.array([1, 2], np.int64))], "/Unsqueeze")
    mask = graph.node("Cast", [mask], "/Cast", to=TensorProto.FLOAT)
    hidden = graph.node("Sub", [graph.constant("one", np.array(1.0, np.float32)), mask], "/Sub")
    return graph.node("Mul", [hidden, graph.constant("lowest", np.array(np.finfo(np.float32).min, np.float32))], "/Mul")


def _embed(graph: Graph, ids: str, types: str) -> str:
    """The sum of word, token-type and position embeddings, normalised."""
    tables = {}
    for kind, rows in (("word", VOCABULARY), ("token_type", TYPES), ("position", POSITIONS)):
        tables[kind] = graph.kernel(f"embeddings.{kind}_embeddings.weight", (rows, HIDDEN), 1)
    positions = graph.constant("embeddings.position_ids", np.arange(TOKENS, dtype=np.int64).reshape(1, TOKENS))
    words = graph.node("Gather", [tables["word"], ids], "/embeddings/word_embeddings/Gather")
    kinds = graph.node("Gather", [tables["token_type"], types], "/embeddings/token_type_embeddings/Gather")
    places = graph.node("Gather", [tables["position"], positions], "/embeddings/position_embeddings/Gather")
    x = graph.node("Add", [words, kinds], "/embeddings/Add")
    x = graph.node("Add", [x, places], "/embeddings/Add_1")
    return graph.layer_norm(x, "embeddings.LayerNorm", HIDDEN, EPSILON)


def _layer(graph: Graph, x: str, name: str, mask: str, *, last: bool) -> str:
    """A post-norm encoder layer; the last one's result is the model's output."""
    inner = graph.attention(x, f"{name}.attention.self", TOKENS, HIDDEN, HEADS, mask)
    inner = graph.linear(inner, f"{name}.attention.output.dense", HIDDEN, HIDDEN)
    x = graph.node("Add", [inner, x], f"/{name}/attention/output/Add")
    x = graph.layer_norm(x, f"{name}.attention.output.LayerNorm", HIDDEN, EPSILON)
    inner = graph.linear(x, f"{name}.intermediate.dense", HIDDEN, INTERMEDIATE)
    inner = graph.linear(graph.gelu(inner, f"{name}/intermediate"), f"{name}.output.dense", INTERMEDIATE, HIDDEN, gain=2.0)
    x = graph.node("Add", [inner, x], f"/{name}/output/Add")
    output = "last_hidden_state" if last else None
    return graph.layer_norm(x, f"{name}.output.LayerNorm", HIDDEN, EPSILON, output)
