//! Token sampling: one token per row, with the filters and random number of its request.
//!
//! A row is read twice: for its maximum, and for the list of its largest weights, which usually determines thresholds
//! and token. With top-k, the second read covers only the threads that hold a candidate, unless top-p applies to all
//! tokens. Greedy rows are read once. Rows without filters, or with too short a list, are read again.
//!
//! Shapes: scores `[rows, vocab]`, any row stride; requests `[rows, REQUEST_WORDS]` and outcomes `[rows,
//! ROW_OUTCOME_WORDS]` u32. Grid: `[rows · CTAs per row, 1, 1]`.

use super::{
    candidates::CandidateList,
    check_threads,
    cta::{CtaCollectives, MAX_ROW_THREADS},
    mass::Number,
    request::{REQUEST_WORDS, SamplingRequest},
    row_reader::RowReader,
    row_stats::{ROW_OUTCOME_WORDS, RowKind, RowStats, VALID},
    weights::Weights,
};
use tilewright_ptx::{build::Builder, ir::Kernel, verify::Invalid};

/// Compile-time configuration of kernels with one CTA per row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleConfig {
    /// Content of rows.
    pub kind: RowKind,
    /// Threads per CTA: a power of two from 64 to 1024.
    pub threads: u32,
}

/// The CTAs that share a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowCtas {
    /// CTAs per row: 1, or a cluster of 2, 4 or 8.
    pub ctas: u32,
    /// Threads per CTA: a power of two from 64 to 1024.
    pub threads: u32,
}

impl RowCtas {
    /// The fastest of the measured choices for this many rows of `vocab` elements on a GPU of this compute capability with
    /// this many SMs. Clusters were measured for 128,256 elements on an H200 only: they pay while they leave SMs idle otherwise.
    pub fn choose([rows, vocab]: [usize; 2], arch: u32, multiprocessors: u32) -> Self {
        const MIN_CLUSTER_VOCAB: usize = 1 << 16;
        let clusters =
            if arch >= 90 && vocab >= MIN_CLUSTER_VOCAB { multiprocessors as usize / rows.max(1) } else { 1 };
        match clusters {
            8.. => Self { ctas: 8, threads: 256 },
            2..8 => Self { ctas: 2, threads: 512 },
            0 | 1 => Self { ctas: 1, threads: cta_threads(vocab) },
        }
    }
}

/// Threads of the CTA of a row: few for a small vocabulary.
pub fn cta_threads(vocab: usize) -> u32 {
    if vocab <= 4096 { 128 } else { 1024 }
}

/// Records the kernel. Parameters: scores, requests, verdicts; stride (u64, in elements), vocab (u32).
///
/// Word 1 of a valid outcome is the token.
///
/// # Errors
/// If `threads` or `ctas` is not supported.
pub fn sample<T: Number>(
    name: &str,
    kind: RowKind,
    RowCtas { ctas, threads }: RowCtas,
) -> Result<Kernel, Invalid> {
    check_threads(name, threads)?;
    check_ctas(name, threads, ctas)?;
    Builder::kernel(name, threads, |k| {
        let (scores, requests) = (k.global::<T>("scores"), k.global::<u32>("requests"));
        let outcomes = k.global::<u32>("verdicts");
        let (stride, vocab) = (k.param::<u64>("stride"), k.param::<u32>("vocab"));
        let cta = CtaCollectives::new(k, threads, ctas);
        let list = CandidateList::new(&cta);
        let at = cta.row().to_u64();
        let row = RowReader::new(&cta, scores.at_wide(at * stride), vocab);
        let load = || SamplingRequest::load(requests, cta.row());
        let (stats, request) = RowStats::with(&list, &row, kind, load);
        let token = k.var("token", 0_u32);
        let drawn = match kind {
            RowKind::Logits => request.temperature.ne(0.0),
            RowKind::Probs | RowKind::Scores => k.constant(true),
        };
        k.when(stats.outcome.eq(VALID), || {
            k.when_else(
                drawn,
                || {
                    let weights = Weights::new(list, row, (kind, &stats), &request);
                    token.set(weights.draw(&weights.apply_filters(), request.stream.uniform(k)));
                },
                || token.set(stats.first_of_max(&cta, &row)),
            );
        });
        let outcome = outcomes.at_wide(at * ROW_OUTCOME_WORDS as u64);
        stats.write(&cta, &row, (outcome, token.get()));
        cta.finish();
    })
}

/// Checks the number of CTAs per row.
fn check_ctas(kernel: &str, threads: u32, ctas: u32) -> Result<(), Invalid> {
    if matches!(ctas, 1 | 2 | 4 | 8) && threads * ctas <= MAX_ROW_THREADS {
        return Ok(());
    }
    let wrong = format!(
        "ctas = {ctas} of {threads} threads, expected 1, 2, 4 or 8, and at most {MAX_ROW_THREADS} threads"
    );
    Err(Invalid::of(kernel, wrong))
}

const _: () = assert!(REQUEST_WORDS.is_multiple_of(4), "requests are loaded as vectors");
