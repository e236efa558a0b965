//! SentencePiece-style tokenizers compared with `transformers`: whole texts, and texts streamed after a prompt.

use crate::fixtures::{fixture, folder, read_json, tokens};
use serde_json::Value;
use tilewright_serve::model::{Decoder, Tokenizer};

const KINDS: [&str; 2] = ["replace", "metaspace"];

fn expected() -> Value {
    read_json("sentencepiece/expected.json")
}

fn open(kind: &str, vocab_size: &Value) -> Tokenizer {
    let dir = folder(&[]);
    std::fs::copy(fixture(&format!("sentencepiece/{kind}.json")), dir.path().join("tokenizer.json")).unwrap();
    Tokenizer::open(dir.path(), vocab_size.as_u64().unwrap() as usize).unwrap()
}

/// The concatenated pieces of `ids`.
pub(crate) fn stream(mut decoder: Decoder, ids: &[u32]) -> String {
    let pieces: String = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
    pieces + &decoder.finish().unwrap()
}

#[test]
fn ids_equal_those_of_transformers() {
    let expected = expected();
    for kind in KINDS {
        let tokenizer = open(kind, &expected[kind]["vocab_size"]);
        for case in expected[kind]["encode"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            assert_eq!(tokenizer.encode(text, true).unwrap(), tokens(&case["ids"]), "{kind}: {text:?}");
        }
    }
}

#[test]
fn a_streamed_continuation_equals_the_text_of_transformers() {
    let expected = expected();
    for kind in KINDS {
        let tokenizer = open(kind, &expected[kind]["vocab_size"]);
        let cases = expected[kind]["decode"].as_array().unwrap();
        assert!(cases.len() > 60);
        let mut spaces = 0;
        for case in cases {
            let (prompt, continuation) = (tokens(&case["prompt"]), tokens(&case["continuation"]));
            let text = case["text"].as_str().unwrap();
            let decoder = tokenizer.decoder_after(&prompt).unwrap();
            assert_eq!(stream(decoder, &continuation), text, "{kind}: {prompt:?} {continuation:?}");
            let whole = [prompt.as_slice(), &continuation].concat();
            assert!(tokenizer.decode(&whole).unwrap().ends_with(text));
            // A text of its own, as in a chat.
            let alone = case["alone"].as_str().unwrap();
            assert_eq!(stream(tokenizer.decoder(), &continuation), alone, "{kind}: {continuation:?}");
            assert_eq!(tokenizer.decode(&continuation).unwrap(), alone);
            spaces += usize::from(text.starts_with(' ') && !alone.starts_with(' '));
        }
        assert!(spaces > 10, "{kind}: the first space matters in {spaces} cases");
    }
}
