//! The distribution of which tokens are drawn: weights that the filters keep, divided by their sum.
//!
//! Softmax is the distribution of logits without filters; the filters that renormalise are those of probabilities.
//!
//! Shapes: scores and out `[rows, vocab]`, a row any stride after the other; requests `[rows, REQUEST_WORDS]` u32. A row that has no
//! distribution becomes NaN. Grid: `[rows, 1, 1]`.

use super::{
    block::Block,
    check_threads,
    elements::List,
    number::Number,
    request::Request,
    row::Row,
    sample::Sample,
    sink::Sink,
    survey::{GOOD, Survey},
    weights::Weights,
};
use tilewright_ptx::{build::Builder, ir::Kernel, verify::Invalid};

/// The kernel. Parameters: scores, requests, out; stride, out_stride (u64, in elements), vocab (u32). `out` may be `scores` where their
/// elements and strides are the same.
///
/// # Errors
/// When a CTA cannot have so many threads.
pub fn distribution<T: Number, O: Number>(name: &str, config: Sample) -> Result<Kernel, Invalid> {
    check_threads(name, config.threads)?;
    Builder::kernel(name, config.threads, |k| {
        let (scores, requests, out) =
            (k.global::<T>("scores"), k.global::<u32>("requests"), k.global::<O>("out"));
        let (stride, out_stride) = (k.param::<u64>("stride"), k.param::<u64>("out_stride"));
        let vocab = k.param::<u32>("vocab");
        let at = k.cta().to_u64();
        let (block, list) = (Block::new(k, config.threads), List::new(k));
        let row = Row::new(&block, scores.at_wide(at * stride), vocab);
        let request = Request::load(requests, k.cta());
        let survey = Survey::new(&block, &row, config.kind);
        let sink = Sink::new(&row, out.at_wide(at * out_stride));
        k.when_else(
            survey.verdict.eq(GOOD),
            || {
                let weights = Weights::new((block, list), row, (config.kind, &survey), &request);
                let kept = weights.keep();
                let share = weights.units.share(kept.mass);
                sink.replace(&row, |place, x| {
                    let weight = weights.weight(place, x);
                    kept.has(place, weight).select(share.of(weight), 0.0_f32)
                });
            },
            || sink.replace(&row, |_, _| k.constant(f32::NAN)),
        );
    })
}
