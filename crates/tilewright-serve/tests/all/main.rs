//! Integration tests of `tilewright-serve`, in one binary to link only once.

mod chat;
mod config;
mod config_families;
mod engine;
mod families;
mod fixtures;
mod generation;
#[path = "../../../tilewright/tests/all/generator.rs"]
#[allow(dead_code, reason = "shared with tests of the engine, which draw real numbers, too")]
mod generator;
mod gguf;
mod packed;
mod pages;
mod radix;
mod sentencepiece;
mod special_files;
mod tokenizer;
mod weights;
