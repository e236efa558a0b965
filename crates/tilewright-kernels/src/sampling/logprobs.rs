//! Inputs of log-probabilities: logits, kept mass and ranks.
//!
//! The host computes the logarithms in f64: `(logit - max) / temperature - ln mass`.
//!
//! Shapes: logits `[rows, vocab]`, any row stride; requests `[rows]`; choices `[rows, 2]` (token, top_n),
//! answers `[rows, LOGPROBS_WORDS]`, tops `[rows, most, 2]` (token, bits of its logit) u32. Grid: `[rows, 1, 1]`.

use super::{
    CandidateList, Candidates, CtaCollectives, ExpAccuracy, Number, Ranking, RequestParams, RowKind,
    RowReader, RowStats, VALID, Weights, check_threads,
};
use tilewright_ptx::{Builder, Invalid, Kernel};

/// Words per answer: the row outcome; bits of the maximum logit, bits of the chosen logit, its rank, unused; low and
/// high word of the kept mass, unused. The mass of the maximum is `2^(mass_bits - 1)`.
pub const LOGPROBS_WORDS: usize = 12;

/// Records the kernel. Parameters: logits, choices, answers, tops; stride (u64, in elements), vocab, most (u32);
/// requests. Filtered logits count as -inf; ranks start at 1.
///
/// # Errors
/// If `threads` is not supported.
pub fn logprobs<T: Number>(name: &str, threads: u32) -> Result<Kernel, Invalid> {
    check_threads(name, threads)?;
    Builder::dependent_kernel(name, threads, |k| {
        let (logits, choices) = (k.global::<T>("logits"), k.global::<u32>("choices"));
        let (answers, tops) = (k.global::<u32>("answers"), k.global::<u32>("tops"));
        let stride = k.param::<u64>("stride");
        let (vocab, most) = (k.param::<u32>("vocab"), k.param::<u32>("most"));
        let requests = RequestParams::new(k);
        let at = k.cta().to_u64();
        let cta = CtaCollectives::new(k, threads, 1);
        let list = CandidateList::new(&cta);
        let row = RowReader::new(&cta, logits.at_wide(at * stride), vocab);
        let answer = answers.at_wide(at * LOGPROBS_WORDS as u64);
        let tops = tops.at_wide(at * most.to_u64() * 2_u64);
        let stats = RowStats::new(&list, &row, RowKind::Logits);
        stats.write(&cta, &row, answer, k.constant(0));
        k.when(stats.outcome.eq(VALID), || {
            let [token, count] = choices.at_wide(at * 2_u64).load_vector::<2>();
            let request = requests.load(k.cta()).decode();
            let weights = Weights::new(list, row, ExpAccuracy::Full, &stats, &request);
            let kept = weights.apply_filters();
            let logit =
                |index, x| kept.contains(index, weights.weight(index, x)).select(x, f32::NEG_INFINITY);

            let chosen = logit(token, row.element(token));
            let before = k.var("before", 0_u32);
            row.each(1, |index, x| {
                let logit = logit(index, x);
                let precedes = logit.gt(chosen) | (logit.eq(chosen) & index.lt(token));
                before.set(before.get() + precedes.select(1_u32, 0_u32));
            });
            let rank = cta.sum(before.get().to_u64()).low() + 1;
            k.when(k.thread().eq(0), || {
                let bits = [stats.max.reinterpret(), chosen.reinterpret(), rank, k.constant(0)];
                answer.plus(4).store_vector::<4>(bits);
                answer.plus(8).store_vector::<4>([
                    kept.mass.low(),
                    kept.mass.high(),
                    k.constant(0),
                    k.constant(0),
                ]);
            });
            k.when(count.gt(0), || {
                let candidates = Candidates::new(list, row);
                let ranking = Ranking::new(candidates, &stats, &logit, k.constant(false), count);
                ranking.emit(count, k.constant(false), |rank, index| {
                    let bits = logit(index, row.element(index)).reinterpret::<u32>();
                    tops.at(rank * 2).store_vector::<2>([index, bits]);
                });
            });
        });
    })
}
