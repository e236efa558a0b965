//! Token sampling: one token per row, with the filters and random number of its request.
//!
//! A row is read twice: for its maximum, and for the list of its largest weights, which usually determines thresholds
//! and token. With top-k, the second read covers only the vectors that hold a candidate, unless top-p applies to all
//! tokens. Greedy rows are read once. Rows without filters, or with too short a list, are read again.
//!
//! Shapes: scores `[rows, vocab]`, any row stride; row ids, requests, tokens `[tokens]`; outcomes `[tokens, ROW_OUTCOME_WORDS]`
//! u32. Grid: `[tokens · CTAs per row, 1, 1]`.

use super::{
    CandidateList, CtaCollectives, ExpAccuracy, MAX_ROW_THREADS, NO_ROW, Number, ROW_OUTCOME_WORDS,
    RequestParams, RequestSources, RowKind, RowReader, RowStats, VALID, Weights, check_threads,
};
use crate::params::{GlobalArray, each};
use tilewright_ptx::{Arg, Builder, Global, Invalid, Kernel, Value};

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
    /// this many SMs, all for 128,256 elements: clusters where SMs are idle otherwise, and two CTAs per SM where rows outnumber SMs.
    pub fn choose([rows, vocab]: [usize; 2], arch: u32, multiprocessors: u32) -> Self {
        const MIN_CLUSTER_VOCAB: usize = 1 << 16;
        let clusters =
            if arch >= 90 && vocab >= MIN_CLUSTER_VOCAB { multiprocessors as usize / rows.max(1) } else { 1 };
        match clusters {
            8.. => Self { ctas: 8, threads: 256 },
            2..8 => Self { ctas: 2, threads: 512 },
            // two fit into an SM; spills on sm_100
            0 if arch < 100 => Self { ctas: 1, threads: 512 },
            0 | 1 => Self { ctas: 1, threads: cta_threads(vocab) },
        }
    }

    /// Minimum resident CTAs per SM. The tail of a row overlaps with the reads of another.
    fn per_sm(self) -> u32 {
        if self.ctas == 1 && self.threads == 512 { 2 } else { 1 }
    }
}

/// Threads of the CTA of a row: few for a small vocabulary.
pub fn cta_threads(vocab: usize) -> u32 {
    if vocab <= 4096 { 128 } else { 1024 }
}

crate::params! {
    /// Arguments of one launch. An address of 0 stands for an absent tensor.
    #[derive(Debug, Clone, Copy)]
    pub struct SampleParams => SampleRegs(this) {
        arrays: u32 = this.requests.arrays(),
        /// Address of the scores.
        scores: u64,
        /// Distance of their rows, in elements.
        stride: u64,
        /// `[rows, vocab]` of the scores.
        shape "": [u32; 2][each(["rows", "vocab"], ())],
        /// Address of the row of each token, i32; without, token `i` is drawn from row `i`.
        row_ids: u64 as GlobalArray<u32>,
        /// Address of the outcomes, aligned to 16 bytes.
        outcomes: u64 as GlobalArray<u32>,
        /// Address of the tokens, i32: 0 where the outcome is not [`VALID`].
        tokens: u64 as GlobalArray<u32>,
        /// Address of a byte per token: 1 where the outcome is [`VALID`], otherwise 0.
        valid: u64,
        /// The requests of the tokens, whose parameters follow these.
        host requests: RequestSources,
    }
}

impl SampleParams {
    /// All launch arguments.
    pub fn all_args(&self) -> Vec<Arg> {
        let mut args = self.args(());
        self.requests.push_after_arrays(&mut args);
        args
    }
}

/// Records the kernel, whose parameters are those of [`SampleParams`]. Word 1 of a valid outcome is the token.
///
/// # Errors
/// If `threads` or `ctas` is not supported.
pub fn sample<T: Number>(name: &str, kind: RowKind, of_row: RowCtas) -> Result<Kernel, Invalid> {
    let RowCtas { ctas, threads } = of_row;
    check_threads(name, threads)?;
    check_ctas(name, threads, ctas)?;
    Builder::dependent_kernel(name, threads, |k| {
        let params = SampleRegs::declare(k, ());
        let SampleRegs { arrays, stride, shape: [rows, vocab], row_ids, .. } = params;
        let requests = RequestParams::after(k, arrays);
        let cta = CtaCollectives::new(k, threads, ctas).with_ctas_per_sm(of_row.per_sm());
        let list = CandidateList::new(&cta);
        let row_id = k.var("row_id", cta.row());
        k.when(row_ids.address().ne(0), || row_id.set(row_ids.at(cta.row()).load()));
        let is_row = row_id.get().lt(rows);
        let at = is_row.select(row_id.get(), 0).to_u64();
        let row = RowReader::new(&cta, Global::<T>::new(params.scores).at_wide(at * stride), vocab);
        let (mut stats, request) = RowStats::with_request(&list, &row, kind, || requests.load(cta.row()));
        stats.outcome = is_row.select(stats.outcome, NO_ROW);
        let token = k.var("token", 0_u32);
        let drawn = match kind {
            RowKind::Logits => request.temperature.ne(0.0),
            RowKind::Probs | RowKind::Scores => k.constant(true),
        };
        k.when(stats.outcome.eq(VALID), || {
            k.when_else(
                drawn,
                || {
                    // before the pass over the row: the stream takes twice the registers of its number
                    let fraction = request.stream.uniform(k);
                    let weights = Weights::new(list, row, ExpAccuracy::RoundedTemperature, &stats, &request);
                    k.when_else(
                        weights.has_short_list(),
                        || token.set(weights.draw_from_short_list(fraction)),
                        || token.set(weights.draw(&weights.apply_filters(), fraction)),
                    );
                },
                || token.set(stats.first_of_max(&cta, &row)),
            );
        });
        params.write_outputs(&cta, &row, &stats, token.get());
        cta.finish();
    })
}

impl<'k> SampleRegs<'k> {
    /// Writes the token of this row, which is 0 unless the row is valid.
    #[track_caller]
    fn write_outputs<T: Number>(
        &self,
        cta: &CtaCollectives<'k>,
        row: &RowReader<'k, T>,
        stats: &RowStats<'k>,
        token: Value<'k, u32>,
    ) {
        let k = cta.k;
        k.when(self.outcomes.address().ne(0), || {
            let outcome = self.outcomes.at_wide(cta.row().to_u64() * ROW_OUTCOME_WORDS as u64);
            stats.write(cta, row, outcome, token);
        });
        let is_first = cta.row_thread().eq(0);
        k.when(is_first & self.tokens.address().ne(0), || self.tokens.at(cta.row()).store(token));
        k.when(is_first & self.valid.ne(0), || {
            let at = Global::<u32>::new(self.valid + cta.row().to_u64());
            at.store_u8(stats.outcome.eq(VALID).select(1_u32, 0_u32));
        });
    }
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
