//! What log-probabilities are computed of: logits, the mass of what is kept, and ranks.
//!
//! The logarithms are left to the host, which has doubles: `(logit - max) / temperature - ln mass`.
//!
//! Shapes: logits `[rows, vocab]`, a row any stride after the other; requests `[rows, REQUEST_WORDS]`, choices `[rows, 2]` (token, top_n), answers
//! `[rows, ANSWER_WORDS]`, tops `[rows, most, 2]` (token, bits of its logit) u32. Grid: `[rows, 1, 1]`.

use super::{
    block::Block,
    check_threads,
    elements::{Elements, List},
    number::Number,
    ranking::Ranking,
    request::Request,
    row::Row,
    survey::{GOOD, Kind, Survey},
    weights::Weights,
};
use tilewright_ptx::{build::Builder, ir::Kernel, isa::warp::WarpReduction, verify::Invalid};

/// Words of an answer: the verdict; bits of the greatest logit, of the chosen one, its rank, nothing; the halves of the mass that
/// is kept, the lower first, of which `2^(mass_bits - 1)` is the mass of the greatest; and nothing.
pub const ANSWER_WORDS: usize = 12;

/// The kernel. Parameters: logits, requests, choices, answers, tops; stride (u64, in elements), vocab, most (u32). Logits that are not
/// kept are -inf; ranks count from 1.
///
/// # Errors
/// When a CTA cannot have so many threads.
pub fn logprobs<T: Number>(name: &str, threads: u32) -> Result<Kernel, Invalid> {
    check_threads(name, threads)?;
    Builder::kernel(name, threads, |k| {
        let (logits, requests) = (k.global::<T>("logits"), k.global::<u32>("requests"));
        let choices = k.global::<u32>("choices");
        let (answers, tops) = (k.global::<u32>("answers"), k.global::<u32>("tops"));
        let stride = k.param::<u64>("stride");
        let (vocab, most) = (k.param::<u32>("vocab"), k.param::<u32>("most"));
        let at = k.cta().to_u64();
        let (block, list) = (Block::new(k, threads), List::new(k));
        let row = Row::new(&block, logits.at_wide(at * stride), vocab);
        let answer = answers.at_wide(at * ANSWER_WORDS as u64);
        let tops = tops.at_wide(at * most.to_u64() * 2_u64);
        let survey = Survey::new(&block, &row, Kind::Logits);
        survey.write(&block, &row, (answer, k.constant(0)));
        k.when(survey.verdict.eq(GOOD), || {
            let [token, count] = choices.at_wide(at * 2_u64).load_vector::<2>();
            let request = Request::load(requests, k.cta());
            let weights = Weights::new((block, list), row, (Kind::Logits, &survey), &request);
            let kept = weights.keep();
            let logit = |place, x| kept.has(place, weights.weight(place, x)).select(x, f32::NEG_INFINITY);

            let chosen = logit(token, row.element(token));
            let before = k.var("before", 0_u32);
            row.each(1, |place, x| {
                let logit = logit(place, x);
                let is_before = logit.gt(chosen) | (logit.eq(chosen) & place.lt(token));
                before.set(before.get() + is_before.select(1_u32, 0_u32));
            });
            let rank = block.reduce(WarpReduction::Add, before.get()) + 1;
            k.when(k.thread().eq(0), || {
                let bits = [survey.max.reinterpret(), chosen.reinterpret(), rank, k.constant(0)];
                answer.plus(4).store_vector::<4>(bits);
                answer.plus(8).store_vector::<4>([
                    kept.mass.low(),
                    kept.mass.high(),
                    k.constant(0),
                    k.constant(0),
                ]);
            });
            k.when(count.gt(0), || {
                let elements = Elements::new(block, list, row);
                let ranking = Ranking::new(elements, &survey, (&logit, k.constant(false)), count);
                ranking.emit((count, k.constant(false)), |rank, place| {
                    let bits = logit(place, row.element(place)).reinterpret::<u32>();
                    tops.at(rank * 2).store_vector::<2>([place, bits]);
                });
            });
        });
    })
}
