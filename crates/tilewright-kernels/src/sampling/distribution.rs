//! Filtered probability distribution of a row: the kept weights divided by their sum.
//!
//! For logits without filters this is softmax; for probabilities it is the renormalizing filters.
//!
//! Shapes: scores and out `[rows, vocab]`, any row strides; requests `[rows]`. An invalid row
//! becomes NaN. Grid: `[rows, 1, 1]`.

use super::{
    CandidateList, CtaCollectives, ExpAccuracy, Number, RequestParams, RowReader, RowStats, RowWriter,
    SampleConfig, VALID, Weights, check_threads,
};
use tilewright_ptx::{Builder, Invalid, Kernel};

/// Records the kernel. Parameters: scores, out; stride, out_stride (u64, in elements), vocab (u32); requests. `out`
/// may alias `scores` if dtypes and strides are equal.
///
/// # Errors
/// If `threads` is not supported.
pub fn distribution<T: Number, O: Number>(name: &str, config: SampleConfig) -> Result<Kernel, Invalid> {
    check_threads(name, config.threads)?;
    Builder::dependent_kernel(name, config.threads, |k| {
        let (scores, out) = (k.global::<T>("scores"), k.global::<O>("out"));
        let (stride, out_stride) = (k.param::<u64>("stride"), k.param::<u64>("out_stride"));
        let vocab = k.param::<u32>("vocab");
        let requests = RequestParams::new(k);
        let at = k.cta().to_u64();
        let cta = CtaCollectives::new(k, config.threads, 1);
        let list = CandidateList::new(&cta);
        let row = RowReader::new(&cta, scores.at_wide(at * stride), vocab);
        let load = || requests.load(k.cta());
        // with a histogram, 1,024 threads of 16-bit elements spill on sm_120
        let (stats, request) = if T::PER_VECTOR == 8 && cta.is_short_of_registers() {
            let request = load().decode();
            (RowStats::new(&list, &row, config.kind), request)
        } else {
            RowStats::with_request(&list, &row, config.kind, load)
        };
        let writer = RowWriter::new(&row, out.at_wide(at * out_stride));
        k.when_else(
            stats.outcome.eq(VALID),
            || {
                let weights = Weights::new(list, row, ExpAccuracy::Full, &stats, &request);
                let kept = weights.apply_filters();
                let normalizer = weights.mass_scale.normalizer(kept.mass);
                writer.replace(&row, |index, x| {
                    let weight = weights.weight(index, x);
                    kept.contains(index, weight).select(normalizer.normalize(weight), 0.0_f32)
                });
            },
            || writer.replace(&row, |_, _| k.constant(f32::NAN)),
        );
    })
}
