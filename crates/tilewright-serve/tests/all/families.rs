//! Random checkpoints of all families compared with `transformers`: names and shapes of weights, logits, greedy tokens, texts.
//!
//! The weights are computed from a seed here and by `tests/fixtures/families.py`.

#[path = "checkpoint.rs"]
pub(crate) mod checkpoint;

use crate::{
    fixtures::{fixture, greedy_tokens, read_json, tokens},
    sentencepiece::stream,
};
use checkpoint::{Checkpoint, relative_error};
use std::collections::BTreeMap;
use tilewright::{Cpu, Dtype};
use tilewright_serve::model::{ModelConfig, Precision, Tokenizer, Transformer, Weights};

#[test]
fn names_and_shapes_of_weights_are_those_of_transformers() {
    for name in Checkpoint::names() {
        let checkpoint = Checkpoint::open(&name);
        let ours: BTreeMap<_, _> = checkpoint.config().parameters().map(|p| (p.name, p.shape)).collect();
        assert_eq!(ours, checkpoint.shapes(), "{name}");
    }
}

#[test]
fn logits_equal_those_of_transformers_in_f32() {
    for checkpoint in Checkpoint::all() {
        let name = checkpoint.name();
        let logits = checkpoint.model(Dtype::F32).score(&Cpu::new(), &checkpoint.prompt(), Dtype::F32);
        let error = relative_error(&logits.expect("logits"), &checkpoint.logits("logits.f32"));
        println!("{name}: f32 logits differ by {error:.2e}");
        assert!(error <= 1e-4, "{name}: {error:e}");
    }
}

/// bf16 weights with f32 activations add only the rounding of weights; with a cache of bf16, and with bf16 throughout, the
/// logits are closer to that than those of `transformers`.
#[test]
fn bf16_logits_are_closer_to_f32_than_those_of_transformers_in_bf16() {
    for checkpoint in Checkpoint::all().filter(|checkpoint| checkpoint.has_logits("logits.bf16")) {
        let name = checkpoint.name();
        let (model, exact) = (checkpoint.model(Dtype::Bf16), checkpoint.logits("logits.bf16_weights"));
        let reference = relative_error(&checkpoint.logits("logits.bf16"), &exact);
        for (activations, kv, bound) in [
            (Dtype::F32, Dtype::F32, 1e-4),
            (Dtype::F32, Dtype::Bf16, reference.min(2e-2)),
            // transformers also rounds outputs of products and the residual stream, so its error is clearly larger
            (Dtype::Bf16, Dtype::Bf16, 0.8 * reference),
        ] {
            let precision = Precision { activations, kv };
            let logits = model.score(&Cpu::new(), &checkpoint.prompt(), precision).expect("logits");
            let error = relative_error(&logits, &exact);
            println!("{name}, {precision:?}: off by {error:.2e}, transformers in bf16 by {reference:.2e}");
            assert!(error < bound, "{name}, {precision:?}: {error:e}, expected below {bound:e}");
        }
    }
}

/// `transformers` warns about such a checkpoint and uses the matrix.
#[test]
fn an_output_matrix_that_differs_from_a_tied_embedding_is_used() {
    let checkpoint = Checkpoint::open("llama");
    let tied = ModelConfig { tie_word_embeddings: true, ..checkpoint.config() };
    let weights = Weights::open(&fixture("llama")).expect("weights");
    let model = Transformer::new(tied, &weights, None).expect("a whole model");
    assert!(!model.config().tie_word_embeddings);
    let logits = model.score(&Cpu::new(), &checkpoint.prompt(), Dtype::F32).expect("logits");
    let error = relative_error(&logits, &checkpoint.logits("logits.f32"));
    assert!(error <= 1e-4, "{error:e}");
}

/// Chunks of the prompt, and pages, do not divide the windows.
#[test]
fn the_engine_generates_the_same_64_greedy_tokens_as_transformers() {
    for checkpoint in Checkpoint::all() {
        let generated = greedy_tokens(checkpoint.model(Dtype::F32), 15, &checkpoint.prompt(), 64);
        assert_eq!(generated.len(), 64);
        assert_eq!(generated, checkpoint.greedy(), "{}", checkpoint.name());
    }
}

#[test]
fn streamed_greedy_tokens_are_the_text_of_transformers() {
    let expected = read_json("texts/expected.json");
    for name in Checkpoint::names() {
        let checkpoint = Checkpoint::open(&name);
        let (generated, expected) = (checkpoint.greedy(), &expected[&name]);
        let text = |field: &str| expected[field].as_str().expect("a text");
        let dir = tempfile::tempdir().unwrap();
        let file = fixture(&format!("texts/{}.json", text("tokenizer")));
        std::fs::copy(file, dir.path().join("tokenizer.json")).unwrap();
        let tokenizer = Tokenizer::open(dir.path(), checkpoint.config().vocab_size).unwrap();
        let prompt = tokens(&expected["prompt"]);
        let decoder = tokenizer.decoder_after(&prompt).unwrap();
        assert_eq!(stream(decoder, &generated), text("continuation"), "{name}");
        assert_eq!(stream(tokenizer.decoder(), &generated), text("alone"), "{name}");
        assert_eq!(tokenizer.decode(&generated).unwrap(), text("alone"), "{name}");
    }
}

/// All families of the supported ones have a checkpoint here or among the fixtures with tokenizers.
#[test]
fn every_family_has_a_checkpoint() {
    let text = ModelConfig::parse("{}").unwrap_err().to_string();
    let (_, families) = text.split_once("expected one of ").expect("the supported families");
    let names = Checkpoint::names();
    for family in families.split(", ") {
        let family = family.trim_end_matches("_text");
        assert!(names.iter().any(|name| name.starts_with(family)), "{family} has no checkpoint");
    }
    assert!(names.len() >= 25, "{} checkpoints", names.len());
}
