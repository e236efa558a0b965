//! Token sampling: one token per row, with the filters and random number of its request.
//!
//! A row is read twice: for its maximum, and for the list of its largest weights, which usually determines thresholds
//! and token. With top-k, the second read covers only the threads that hold a candidate, unless top-p applies to all
//! tokens. Greedy rows are read once. Rows without filters, or with too short a list, are read again.
//!
//! Shapes: scores `[rows, vocab]`, any row stride; requests `[rows, REQUEST_WORDS]` and outcomes `[rows,
//! ROW_OUTCOME_WORDS]` u32. Grid: `[rows, 1, 1]`.

use super::{
    candidates::CandidateList,
    check_threads,
    cta::CtaCollectives,
    mass::Number,
    request::{REQUEST_WORDS, SamplingRequest},
    row_reader::RowReader,
    row_stats::{ROW_OUTCOME_WORDS, RowKind, RowStats, VALID},
    weights::Weights,
};
use tilewright_ptx::{build::Builder, ir::Kernel, verify::Invalid};

/// Compile-time configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleConfig {
    /// Content of rows.
    pub kind: RowKind,
    /// Threads per CTA: a power of two from 64 to 1024.
    pub threads: u32,
}

/// Records the kernel. Parameters: scores, requests, verdicts; stride (u64, in elements), vocab (u32).
///
/// Word 1 of a valid outcome is the token.
///
/// # Errors
/// If `threads` is not supported.
pub fn sample<T: Number>(name: &str, config: SampleConfig) -> Result<Kernel, Invalid> {
    check_threads(name, config.threads)?;
    Builder::kernel(name, config.threads, |k| {
        let (scores, requests) = (k.global::<T>("scores"), k.global::<u32>("requests"));
        let outcomes = k.global::<u32>("verdicts");
        let (stride, vocab) = (k.param::<u64>("stride"), k.param::<u32>("vocab"));
        let at = k.cta().to_u64();
        let (cta, list) = (CtaCollectives::new(k, config.threads), CandidateList::new(k));
        let row = RowReader::new(&cta, scores.at_wide(at * stride), vocab);
        let request = SamplingRequest::load(requests, k.cta());
        let stats = RowStats::new(&cta, &row, config.kind);
        let token = k.var("token", 0_u32);
        let drawn = match config.kind {
            RowKind::Logits => request.temperature.ne(0.0),
            RowKind::Probs | RowKind::Scores => k.constant(true),
        };
        k.when(stats.outcome.eq(VALID), || {
            k.when_else(
                drawn,
                || {
                    let weights = Weights::new((cta, list), row, (config.kind, &stats), &request);
                    token.set(weights.draw(&weights.apply_filters(), request.stream.uniform(k)));
                },
                || token.set(stats.first_of_max(&cta, &row)),
            );
        });
        let outcome = outcomes.at_wide(at * ROW_OUTCOME_WORDS as u64);
        stats.write(&cta, &row, (outcome, token.get()));
    })
}

const _: () = assert!(REQUEST_WORDS.is_multiple_of(4), "requests are loaded as vectors");
