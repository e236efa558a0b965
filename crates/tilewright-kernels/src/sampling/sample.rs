//! One token for each row, by the filters and the random number of its request.
//!
//! A row is read twice: for its greatest number, and for the list of the greatest weights, among which thresholds and token are found;
//! greedy rows once. Where the list is too short, and where there is no filter, rows are read again.
//!
//! Shapes: scores `[rows, vocab]`, a row any stride after the other; requests `[rows, REQUEST_WORDS]` and verdicts `[rows,
//! VERDICT_WORDS]` u32. Grid: `[rows, 1, 1]`.

use super::{
    block::Block,
    check_threads,
    elements::List,
    number::Number,
    request::{REQUEST_WORDS, Request},
    row::Row,
    survey::{GOOD, Kind, Survey, VERDICT_WORDS},
    weights::Weights,
};
use tilewright_ptx::{build::Builder, ir::Kernel, verify::Invalid};

/// What a kernel is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// What rows hold.
    pub kind: Kind,
    /// Threads of a CTA: a power of two from 64 to 1024.
    pub threads: u32,
}

/// The kernel. Parameters: scores, requests, verdicts; stride (u64, in elements), vocab (u32).
///
/// Word 1 of a good verdict is the token.
///
/// # Errors
/// When a CTA cannot have so many threads.
pub fn sample<T: Number>(name: &str, config: Sample) -> Result<Kernel, Invalid> {
    check_threads(name, config.threads)?;
    Builder::kernel(name, config.threads, |k| {
        let (scores, requests) = (k.global::<T>("scores"), k.global::<u32>("requests"));
        let verdicts = k.global::<u32>("verdicts");
        let (stride, vocab) = (k.param::<u64>("stride"), k.param::<u32>("vocab"));
        let at = k.cta().to_u64();
        let (block, list) = (Block::new(k, config.threads), List::new(k));
        let row = Row::new(&block, scores.at_wide(at * stride), vocab);
        let request = Request::load(requests, k.cta());
        let survey = Survey::new(&block, &row, config.kind);
        let token = k.var("token", survey.first);
        let drawn = match config.kind {
            Kind::Logits => request.temperature.ne(0.0),
            Kind::Probs | Kind::Scores => k.constant(true),
        };
        k.when(survey.verdict.eq(GOOD) & drawn, || {
            let weights = Weights::new((block, list), row, (config.kind, &survey), &request);
            token.set(weights.draw(&weights.keep(), request.stream.uniform(k)));
        });
        let verdict = verdicts.at_wide(at * VERDICT_WORDS as u64);
        survey.write(&block, &row, (verdict, token.get()));
    })
}

const _: () = assert!(REQUEST_WORDS.is_multiple_of(4), "requests are loaded as vectors");
