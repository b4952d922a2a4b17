"""The bundle, `*.mvb`: schema, codec, checks, writer and reader. No TVM; the reader's side is standard library only."""
