"""BERT, uncased, encoder and pooler (Devlin et al., NAACL 2019, section 3), for a fixed number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from .graph import Graph


@dataclass(frozen=True, slots=True)
class Size:
    """One of the two published models, which exists once: its weights are the same for any number of tokens."""

    key: str
    layers: int
    hidden: int
    heads: int


BASE = Size("bert-base", layers=12, hidden=768, heads=12)
LARGE = Size("bert-large", layers=24, hidden=1024, heads=16)

VOCABULARY, POSITIONS, TYPES = 30522, 512, 2
EPSILON = 1e-12


def build(name: str, size: Size, tokens: int) -> Graph:
    """input_ids, attention_mask and token_type_ids (int64 [1, tokens]) to the last hidden state and the pooled first token."""
    graph, hidden = Graph(name, size.key), size.hidden
    ids = graph.input("input_ids", (1, tokens), TensorProto.INT64)
    mask = graph.input("attention_mask", (1, tokens), TensorProto.INT64)
    types = graph.input("token_type_ids", (1, tokens), TensorProto.INT64)
    bias = _mask_to_bias(graph, mask)
    x = _embed(graph, ids, types, hidden, tokens)
    for layer in range(size.layers):
        x = _layer(graph, x, f"encoder.layer.{layer}", size, tokens, bias, last=layer == size.layers - 1)
    first = graph.node("Gather", [x, graph.constant("first", np.array(0, np.int64))], "/pooler/Gather", axis=1)
    weights = [graph.kernel("pooler.dense.weight", (hidden, hidden), hidden), graph.bias("pooler.dense.bias", (hidden,))]
    first = graph.node("Gemm", [first, *weights], "/pooler/dense/Gemm", transB=1)
    graph.node("Tanh", [first], "/pooler/activation/Tanh", "pooler_output")
    graph.output("last_hidden_state", (1, tokens, hidden))
    graph.output("pooler_output", (1, hidden))
    return graph


def _mask_to_bias(graph: Graph, mask: str) -> str:
    """0 where the mask is 1, the lowest float where it is 0: [1, 1, 1, tokens]."""
    mask = graph.node("Unsqueeze", [mask, graph.constant("mask_axes", np.array([1, 2], np.int64))], "/Unsqueeze")
    mask = graph.node("Cast", [mask], "/Cast", to=TensorProto.FLOAT)
    hidden = graph.node("Sub", [graph.constant("one", np.array(1.0, np.float32)), mask], "/Sub")
    return graph.node("Mul", [hidden, graph.constant("lowest", np.array(np.finfo(np.float32).min, np.float32))], "/Mul")


def _embed(graph: Graph, ids: str, types: str, hidden: int, tokens: int) -> str:
    """The sum of word, token-type and position embeddings, normalised."""
    tables = {}
    for kind, rows in (("word", VOCABULARY), ("token_type", TYPES), ("position", POSITIONS)):
        tables[kind] = graph.kernel(f"embeddings.{kind}_embeddings.weight", (rows, hidden), 1)
    positions = graph.constant("embeddings.position_ids", np.arange(tokens, dtype=np.int64).reshape(1, tokens))
    words = graph.node("Gather", [tables["word"], ids], "/embeddings/word_embeddings/Gather")
    kinds = graph.node("Gather", [tables["token_type"], types], "/embeddings/token_type_embeddings/Gather")
    places = graph.node("Gather", [tables["position"], positions], "/embeddings/position_embeddings/Gather")
    x = graph.node("Add", [words, kinds], "/embeddings/Add")
    x = graph.node("Add", [x, places], "/embeddings/Add_1")
    return graph.layer_norm(x, "embeddings.LayerNorm", hidden, EPSILON)


def _layer(graph: Graph, x: str, name: str, size: Size, tokens: int, mask: str, *, last: bool) -> str:
    """A post-norm encoder layer; the last one's result is the model's output."""
    hidden, intermediate = size.hidden, 4 * size.hidden
    inner = graph.attention(x, f"{name}.attention.self", tokens, hidden, size.heads, mask)
    inner = graph.linear(inner, f"{name}.attention.output.dense", hidden, hidden)
    x = graph.node("Add", [inner, x], f"/{name}/attention/output/Add")
    x = graph.layer_norm(x, f"{name}.attention.output.LayerNorm", hidden, EPSILON)
    inner = graph.linear(x, f"{name}.intermediate.dense", hidden, intermediate)
    inner = graph.linear(graph.gelu(inner, f"{name}/intermediate"), f"{name}.output.dense", intermediate, hidden, gain=2.0)
    x = graph.node("Add", [inner, x], f"/{name}/output/Add")
    output = "last_hidden_state" if last else None
    return graph.layer_norm(x, f"{name}.output.LayerNorm", hidden, EPSILON, output)
