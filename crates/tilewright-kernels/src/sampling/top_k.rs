//! Top-k selection: the `k` largest elements of each row with their indices, and rows masked to them.
//!
//! Shapes: scores, out `[rows, vocab]`, values `[rows, k]`, of one dtype and any row strides; indices `[rows, k]`
//! i32; counts `[rows]` u32. A row that holds NaN gives NaN and -1. Grid: `[rows, 1, 1]`.

use super::{
    candidates::{CandidateList, Candidates},
    check_threads,
    cta::CtaCollectives,
    mass::Number,
    ranking::Ranking,
    row_reader::RowReader,
    row_stats::{RowKind, RowStats, VALID},
    row_writer::RowWriter,
};
use tilewright_ptx::{build::Builder, ir::Kernel, verify::Invalid};

/// Flag of [`top_k`]: descending values instead of ascending indices.
pub const SORTED: u32 = 1;
/// Flag of [`top_k`]: among ties, the last indices win.
pub const LAST_FIRST: u32 = 2;

/// Selects exactly `k` elements per row. Parameters: scores, values, indices; stride, values_stride (u64, in
/// elements), vocab, k, flags (u32).
///
/// # Errors
/// If `threads` is not supported.
pub fn top_k<T: Number>(name: &str, threads: u32) -> Result<Kernel, Invalid> {
    check_threads(name, threads)?;
    Builder::kernel(name, threads, |k| {
        let (scores, values, indices) =
            (k.global::<T>("scores"), k.global::<T>("values"), k.global::<i32>("indices"));
        let (stride, values_stride) = (k.param::<u64>("stride"), k.param::<u64>("values_stride"));
        let (vocab, count, flags) = (k.param::<u32>("vocab"), k.param::<u32>("k"), k.param::<u32>("flags"));
        let at = k.cta().to_u64();
        let cta = CtaCollectives::new(k, threads, 1);
        let list = CandidateList::new(&cta);
        let row = RowReader::new(&cta, scores.at_wide(at * stride), vocab);
        let (values, indices) = (values.at_wide(at * values_stride), indices.at_wide(at * count.to_u64()));
        let stats = RowStats::new(&list, &row, RowKind::Scores);
        k.when_else(
            stats.outcome.eq(VALID),
            || {
                let candidates = Candidates::new(list, row);
                let last_first = (flags & LAST_FIRST).ne(0);
                let ranking = Ranking::new(candidates, &stats, (&|_, x| x, last_first), count);
                ranking.emit((count, (flags & SORTED).eq(0)), |rank, index| {
                    values.at(rank).store(T::narrow(row.element(index)));
                    indices.at(rank).store(index.reinterpret::<i32>());
                });
            },
            || {
                k.repeat((k.thread(), count), threads, |rank| {
                    values.at(rank).store(T::narrow(k.constant(f32::NAN)));
                    indices.at(rank).store(-1_i32);
                });
            },
        );
    })
}

/// Replaces values below the `count`-th largest of their row by -inf. Parameters: scores, counts, out; stride,
/// out_stride (u64, in elements), vocab (u32). From `vocab` on, and for counts
/// below 1, nothing is masked.
///
/// # Errors
/// If `threads` is not supported.
pub fn top_k_mask<T: Number>(name: &str, threads: u32) -> Result<Kernel, Invalid> {
    check_threads(name, threads)?;
    Builder::kernel(name, threads, |k| {
        let (scores, counts, out) =
            (k.global::<T>("scores"), k.global::<u32>("counts"), k.global::<T>("out"));
        let (stride, out_stride) = (k.param::<u64>("stride"), k.param::<u64>("out_stride"));
        let vocab = k.param::<u32>("vocab");
        let at = k.cta().to_u64();
        let cta = CtaCollectives::new(k, threads, 1);
        let list = CandidateList::new(&cta);
        let row = RowReader::new(&cta, scores.at_wide(at * stride), vocab);
        // 0 wraps to the largest count
        let count = (counts.at(k.cta()).load() - 1).min(vocab - 1) + 1;
        let stats = RowStats::new(&list, &row, RowKind::Scores);
        let writer = RowWriter::new(&row, out.at_wide(at * out_stride));
        k.when_else(
            stats.outcome.eq(VALID),
            || {
                let candidates = Candidates::new(list, row);
                let value = |_, x| x;
                Ranking::new(candidates, &stats, (&value, k.constant(false)), count);
                let (least, _) = candidates.threshold(&value, &|_, _| k.constant(1_u64), count.to_u64());
                writer.replace(&row, |_, x| x.ge(least).select(x, f32::NEG_INFINITY));
            },
            || writer.replace(&row, |_, _| k.constant(f32::NAN)),
        );
    })
}
