//! NaN weights: requests end with an error, never with a hang, a panic or an arbitrary token.

use super::session::{Case, Session, Setup, case, prompt};
use crate::fixtures::{copy, transformer};
use tempfile::TempDir;
use tilewright::Cpu;
use tilewright_serve::{Engine, FinishReason};

/// The fixture `llama` with NaN in some elements of a tensor.
fn damaged(tensor: &str, elements: std::ops::Range<usize>) -> TempDir {
    let dir = copy("llama");
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).expect("the weights");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let data = file.tensor(tensor).expect("the tensor").data();
    let start = data.as_ptr() as usize - bytes.as_ptr() as usize;
    for element in elements {
        bytes[start + 4 * element..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    }
    std::fs::write(path, bytes).expect("written");
    dir
}

fn session(dir: &TempDir, setup: Setup) -> Session {
    let model = transformer(dir.path(), None);
    Session::new(Engine::new(model, Cpu::with_threads(2).unwrap(), setup.options).expect("an engine"))
}

fn failed() -> Option<FinishReason> {
    Some(FinishReason::Failed("logits hold NaN at token 0".to_owned()))
}

#[test]
fn a_model_of_nan_fails_every_request() {
    let dir = damaged("model.norm.weight", 0..64);
    for max_step_tokens in [512, 9] {
        let setup = Setup::new("llama").with(|options| {
            (options.prefix_reuse, options.max_step_tokens) = (true, max_step_tokens);
        });
        let mut session = session(&dir, setup);
        let mut ids = session.submit_all(&prompt(7, 37), &[case(1, 1, 44).options, case(2, 1, 44).options]);
        ids.push(session.submit(&case(1, 1, 44)));
        let mut greedy = case(2, 17, 44);
        greedy.options.sampling.temperature = 0.0;
        ids.push(session.submit(&greedy));
        session.finish();
        for id in ids {
            let outcome = session.take_outcome(id);
            assert_eq!((outcome.tokens, outcome.reason), (vec![], failed()));
        }
    }
}

#[test]
fn a_token_of_nan_fails_only_the_requests_that_contain_it() {
    const POISON: u32 = 200;
    let dir = damaged("model.embed_tokens.weight", POISON as usize * 64..(POISON as usize + 1) * 64);
    let clean = |case: &Case| !case.prompt.contains(&POISON);
    let candidates: Vec<_> = (1..30).map(|seed| case(seed, 20, 44)).filter(clean).collect();
    let expected = Setup::new("llama").run_separately(&candidates);
    // a healthy request may sample the token; these do not
    let (others, expected): (Vec<_>, Vec<_>) = candidates
        .into_iter()
        .zip(expected)
        .filter(|(_, outcome)| !outcome.tokens.contains(&POISON))
        .take(6)
        .unzip();
    assert_eq!(others.len(), 6);
    for (num_pages, prefix_reuse) in [(512, false), (512, true), (9, true), (9, false)] {
        let setup = Setup::new("llama").with(|options| {
            (options.num_pages, options.prefix_reuse, options.max_step_tokens) =
                (num_pages, prefix_reuse, 33);
        });
        let mut session = session(&dir, setup);
        let mut poisoned = case(40, 30, 44);
        poisoned.prompt[11] = POISON;
        let mut healthy = Vec::new();
        let mut affected = Vec::new();
        for other in &others {
            affected.extend(
                session.submit_all(&poisoned.prompt, &[poisoned.options.clone(), other.options.clone()]),
            );
            healthy.push(session.submit(other));
        }
        session.finish();
        let outcomes: Vec<_> = healthy.into_iter().map(|id| session.take_outcome(id)).collect();
        assert_eq!(outcomes, expected, "{setup:?}");
        for id in affected {
            let outcome = session.take_outcome(id);
            assert_eq!((outcome.tokens, outcome.reason), (vec![], failed()));
        }
    }
}
