//! `generation_config.json`: the defaults that are taken, the fields that are not supported, and their effect in the engine.

use crate::engine::session::Setup;
use tilewright::sampling::SamplingParams;
use tilewright_serve::{GenerateOptions, RequestEdits, model::GenerationDefaults};

fn parse(text: &str) -> GenerationDefaults {
    GenerationDefaults::parse(text, 288).unwrap()
}

#[test]
fn sampling_fields_are_taken_and_named() {
    let defaults = parse(
        r#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1,
            "repetition_penalty": 1.05, "suppress_tokens": [3, 4], "begin_suppress_tokens": 5,
            "bad_words_ids": [[7]], "typical_p": 1, "num_beams": 1, "max_length": 20, "eos_token_id": 2}"#,
    );
    let params = defaults.sampling(SamplingParams { seed: 7, ..SamplingParams::default() });
    assert_eq!((params.temperature, params.top_k, params.top_p), (0.6, Some(20), 0.95));
    assert_eq!((params.min_p, params.seed), (0.1, 7));
    let edits = RequestEdits { repetition_penalty: 1.05, suppress: vec![3, 4, 7], begin_suppress: vec![5] };
    assert_eq!(defaults.edits(), edits);
    let taken: Vec<String> = defaults.taken().into_iter().map(|(_, text)| text).collect();
    assert_eq!(
        taken.join(", "),
        "do_sample = true, temperature = 0.6, top_k = 20, top_p = 0.95, min_p = 0.1, repetition_penalty = 1.05, \
         suppress_tokens of 3 tokens, begin_suppress_tokens of 1 token"
    );
    assert!(defaults.unsupported().is_empty());

    // Greedy, whatever the temperature; 0 keeps all tokens.
    let greedy = parse(r#"{"do_sample": false, "temperature": 0.6, "top_k": 0}"#);
    let params = greedy.sampling(SamplingParams { top_k: Some(9), ..SamplingParams::default() });
    assert_eq!((params.temperature, params.top_k), (0.0, None));
    assert_eq!(parse("{}").sampling(params), params);
    assert_eq!((parse("{}").edits(), parse("{}").taken().len()), (RequestEdits::default(), 0));
}

#[test]
fn unsupported_fields_are_named_once() {
    let defaults = parse(
        r#"{"typical_p": 0.9, "no_repeat_ngram_size": 3, "num_beams": 4, "forced_eos_token_id": 2,
            "stop_strings": ["END"], "bad_words_ids": [[1, 2], [3, 4]], "min_new_tokens": 8, "sequence_bias": null}"#,
    );
    assert_eq!(
        defaults.unsupported().join("; "),
        "typical_p = 0.9; no_repeat_ngram_size = 3; num_beams = 4; min_new_tokens = 8; forced_eos_token_id = 2; \
         stop_strings = [\"END\"]; bad_words_ids with words of several tokens"
    );
}

#[test]
fn invalid_fields_are_rejected() {
    for (text, expected) in [
        (r#"{"temperature": -1}"#, "temperature = -1, expected a number of at least 0"),
        (r#"{"temperature": "hot"}"#, "temperature = \"hot\", expected a number of at least 0"),
        (r#"{"top_p": 1.5}"#, "top_p = 1.5, expected a number in (0, 1]"),
        (r#"{"min_p": -0.5}"#, "min_p = -0.5, expected a number in [0, 1]"),
        (r#"{"top_k": -1}"#, "top_k = -1, expected an integer in 0..=2147483647"),
        (r#"{"repetition_penalty": 0}"#, "repetition_penalty = 0, expected a number above 0"),
        (r#"{"do_sample": 1}"#, "do_sample = 1, expected true or false"),
        (
            r#"{"suppress_tokens": [288]}"#,
            "suppress_tokens = [288], expected token ids below vocab_size = 288",
        ),
    ] {
        let error = GenerationDefaults::parse(text, 288).unwrap_err().to_string();
        assert_eq!(error, format!("model.config: generation_config.json: {expected}"));
    }
}

/// The greedy tokens of `count` continuations.
fn greedy(edits: &RequestEdits, count: usize) -> Vec<Vec<u32>> {
    let mut session = Setup::new("llama").start();
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let wanted = GenerateOptions { max_tokens: 24, sampling, stop: Vec::new(), edits: edits.clone() };
    let ids = session.submit_all(&[5, 6, 7, 8], &vec![wanted; count]);
    session.finish();
    ids.into_iter().map(|id| session.take_outcome(id).tokens).collect()
}

#[test]
fn suppressed_and_repeated_tokens_are_avoided() {
    let plain = greedy(&RequestEdits::default(), 1).remove(0);
    let suppress = RequestEdits { suppress: plain[..3].to_vec(), ..RequestEdits::default() };
    // Continuations of one prompt share a row of logits.
    for text in greedy(&suppress, 2) {
        assert!(text.iter().all(|token| !plain[..3].contains(token)), "{text:?}");
    }
    let first = RequestEdits { begin_suppress: vec![plain[0]], ..RequestEdits::default() };
    assert_ne!(greedy(&first, 1)[0][0], plain[0]);
    let distinct = |text: &[u32]| text.iter().collect::<std::collections::BTreeSet<_>>().len();
    let penalty = RequestEdits { repetition_penalty: 1e6, ..RequestEdits::default() };
    let penalized = greedy(&penalty, 1).remove(0);
    assert_eq!(distinct(&penalized), penalized.len(), "a large penalty forbids repetition: {penalized:?}");
    assert!(penalized.iter().all(|token| ![5, 6, 7, 8].contains(token)));
}

#[test]
fn edits_outside_the_vocabulary_are_rejected() {
    let mut session = Setup::new("llama").start();
    for (edits, expected) in [
        (
            RequestEdits { suppress: vec![288], ..RequestEdits::default() },
            "engine.submit: suppress has token 288, which is not in 0..288",
        ),
        (
            RequestEdits { repetition_penalty: f32::NAN, ..RequestEdits::default() },
            "engine.submit: repetition_penalty = NaN is not a finite number > 0",
        ),
    ] {
        let wanted =
            GenerateOptions { max_tokens: 1, sampling: SamplingParams::default(), stop: Vec::new(), edits };
        assert_eq!(session.engine.submit(&[1], &[wanted]).unwrap_err().to_string(), expected);
    }
}
