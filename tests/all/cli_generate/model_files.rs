//! The effect of a model's files on `generate`: sampling defaults, an own output matrix, and the tokenizer's spaces.

use super::program::{edit, generate};
use crate::fixtures::copy;
use serde_json::json;
use std::path::Path;

/// Writes a `generation_config.json`.
fn write_defaults(dir: &Path, fields: &serde_json::Value) {
    std::fs::write(dir.join("generation_config.json"), fields.to_string()).expect("written");
}

#[test]
fn the_model_sets_the_defaults_that_no_flag_overrides() {
    let dir = copy("llama");
    write_defaults(
        dir.path(),
        &json!({ "do_sample": true, "temperature": 0.5, "top_k": 5, "repetition_penalty": 1.5, "typical_p": 0.9 }),
    );
    let path = dir.path().display().to_string();
    let common = ["--max-tokens", "40", "--model", &path, "the pages"];
    let run = generate(&common);
    let note = "model     generation_config.json: do_sample = true, temperature = 0.5, top_k = 5, repetition_penalty = 1.5\n\
                model     generation_config.json: typical_p = 0.9 is not supported\n";
    assert!(run.err.ends_with(note), "{}", run.err);
    let flags = ["--temperature", "0.5", "--top-k", "5"];
    let same = generate(&[&flags[..], &common].concat());
    assert_eq!(same.out, run.out);
    let note = "model     generation_config.json: repetition_penalty = 1.5\nmodel     generation_config.json: typical_p = 0.9";
    assert!(same.err.contains(note), "{}", same.err);
    write_defaults(dir.path(), &json!({ "repetition_penalty": 1.5 }));
    assert_eq!(generate(&[&flags[..], &common].concat()).out, run.out);
    write_defaults(dir.path(), &json!({}));
    let plain = generate(&[&flags[..], &common].concat());
    assert_ne!(plain.out, run.out, "the penalty has an effect");
    assert!(!plain.err.contains("model     "), "{}", plain.err);
    write_defaults(dir.path(), &json!({ "do_sample": false }));
    let greedy = generate(&common);
    assert_eq!(greedy.out, generate(&[&["--temperature", "0"], &common[..]].concat()).out);
}

#[test]
fn an_output_matrix_that_differs_from_the_tied_embedding_is_used_and_named() {
    let dir = copy("llama");
    let path = dir.path().display().to_string();
    let common = ["--temperature", "0", "--max-tokens", "20", "--model", &path, "the pages"];
    let untied = generate(&common);
    edit(&dir, "config.json", "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    let tied = generate(&common);
    assert_eq!(tied.out, untied.out);
    let note = "model     lm_head.weight differs from the embedding, so tie_word_embeddings has no effect\n";
    assert!(tied.err.contains(note) && !untied.err.contains(note), "{}", tied.err);
}

/// A SentencePiece-style tokenizer of special tokens, bytes and 29 words, of which the model may only generate words.
#[test]
fn a_continuation_keeps_the_space_before_its_first_word() {
    let dir = copy("llama");
    let mut names = vec!["<unk>".to_owned(), "<s>".to_owned(), "</s>".to_owned()];
    names.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    names.extend((0..29).map(|word| format!("▁w{word}")));
    let vocab: serde_json::Map<_, _> =
        names.iter().zip(0..).map(|(name, id)| (name.clone(), json!(id))).collect();
    let tokenizer = json!({
        "version": "1.0",
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
            { "type": "ByteFallback" }, { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 }
        ] },
        "model": { "type": "BPE", "unk_token": "<unk>", "byte_fallback": true, "vocab": vocab, "merges": [] }
    });
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).expect("written");
    std::fs::write(
        dir.path().join("tokenizer_config.json"),
        r#"{"chat_template": "{{ messages[0].content }}"}"#,
    )
    .expect("written");
    write_defaults(dir.path(), &json!({ "suppress_tokens": (0..259).collect::<Vec<_>>() }));
    let path = dir.path().display().to_string();
    let common = ["-q", "--max-tokens", "5", "--model", &path, "page"];
    let run = generate(&common);
    let continuation = run.text().strip_prefix("page").expect("the prompt comes first");
    assert!(continuation.starts_with(" w"), "{:?}", run.out);
    // An answer in a chat is a text of its own.
    let chat = generate(&[&["--chat"], &common[..]].concat());
    assert!(!chat.text().contains("page w") && chat.text().contains('w'), "{:?}", chat.out);
}
