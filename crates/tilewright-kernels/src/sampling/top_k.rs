//! Top-k selection: the `k` largest elements of each row with their indices, rows masked to them, and indices in a window of each
//! row as offsets or as slots of a page table.
//!
//! Shapes: scores, out `[rows, vocab]`, values `[rows, k]`, of one dtype and any row strides; indices `[rows, k]`
//! i32; counts `[rows]` u32. A row that holds NaN gives NaN and -1. Grid: `[rows, 1, 1]`.

use super::{
    CandidateList, Candidates, CtaCollectives, Number, Ranking, RowKind, RowReader, RowStats, RowWriter,
    VALID, check_threads,
};
use tilewright_ptx::{Builder, Global, Invalid, Kernel, Value};

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
    Builder::dependent_kernel(name, threads, |k| {
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
                let ranking = Ranking::new(candidates, &stats, &|_, x| x, last_first, count);
                ranking.emit(count, (flags & SORTED).eq(0), |rank, index| {
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

/// Selects in a window of each row, and maps the indices; all up to `k` elements, and -1 after them. Parameters: scores, lengths, starts,
/// bases, table, table_rows, indices, window_indices; stride (u64, in elements), max_len, k, table_width, tables, page_shift, flags (u32).
///
/// Arrays are i32 `[rows]`, indices `[rows, k]`, the table `[tables, table_width]`; only scores, lengths and indices may not be 0.
/// Starts and bases are 0 by default, table_rows the row. Without a table an index becomes `base + index`. With one it is a position
/// in pages of `1 << page_shift` from the entry `base` of its table on, -1 if it has no page there.
///
/// # Errors
/// If `threads` is not supported.
pub fn top_k_transform<T: Number>(name: &str, threads: u32) -> Result<Kernel, Invalid> {
    check_threads(name, threads)?;
    Builder::dependent_kernel(name, threads, |k| {
        let scores = k.global::<T>("scores");
        let row_at = k.cta();
        let optional = |name, default: Value<'_, u32>| {
            let (array, value) = (k.param::<u64>(name), k.var(name, default));
            k.when(array.ne(0), || value.set(Global::<u32>::new(array).at(row_at).load()));
            value.get()
        };
        let zero = k.constant(0_u32);
        let [length, start, base] = ["lengths", "starts", "bases"].map(|name| optional(name, zero));
        let (table, table_row) = (k.param::<u64>("table"), optional("table_rows", row_at));
        let [indices, window_indices] = ["indices", "window_indices"].map(|name| k.param::<u64>(name));
        let stride = k.param::<u64>("stride");
        let [max_len, count, width, tables, shift, flags] =
            ["max_len", "k", "table_width", "tables", "page_shift", "flags"].map(|name| k.param::<u32>(name));
        // negative starts and bases are beyond every row and table
        let start = start.min(max_len);
        let length = (length >> 31).ne(0).select(zero, length).min(max_len - start).named("length");
        let map = IndexMap { base, table, table_row, width, tables, shift };
        let first = row_at.to_u64() * count.to_u64();
        let store = |rank: Value<'_, u32>, index: Value<'_, u32>, mapped: Value<'_, u32>| {
            Global::<u32>::new(indices).at_wide(first + rank.to_u64()).store(mapped);
            k.when(window_indices.ne(0), || {
                Global::<u32>::new(window_indices).at_wide(first + rank.to_u64()).store(index);
            });
        };
        // the first `len` elements, then -1
        let store_first = |len: Value<'_, u32>| {
            k.repeat((k.thread(), count), threads, |rank| {
                let none = k.constant(u32::MAX);
                k.when_else(rank.lt(len), || store(rank, rank, map.apply(rank)), || store(rank, none, none));
            });
        };
        let cta = CtaCollectives::new(k, threads, 1);
        let list = CandidateList::new(&cta);
        let row = RowReader::new(&cta, scores.at_wide(row_at.to_u64() * stride + start.to_u64()), length);
        k.when_else(
            length.gt(count),
            || {
                let stats = RowStats::new(&list, &row, RowKind::Scores);
                k.when_else(
                    stats.outcome.eq(VALID),
                    || {
                        let candidates = Candidates::new(list, row);
                        let last_first = (flags & LAST_FIRST).ne(0);
                        let ranking = Ranking::new(candidates, &stats, &|_, x| x, last_first, count);
                        ranking.emit(count, k.constant(true), |rank, index| {
                            store(rank, index, map.apply(index));
                        });
                    },
                    || store_first(zero),
                );
            },
            || store_first(length),
        );
    })
}

/// The mapping of [`top_k_transform`].
#[derive(Clone, Copy)]
struct IndexMap<'k> {
    base: Value<'k, u32>,
    table: Value<'k, u64>,
    table_row: Value<'k, u32>,
    width: Value<'k, u32>,
    tables: Value<'k, u32>,
    shift: Value<'k, u32>,
}

impl<'k> IndexMap<'k> {
    #[track_caller]
    fn apply(self, index: Value<'k, u32>) -> Value<'k, u32> {
        let Self { base, table, table_row, width, tables, shift } = self;
        let k = base.builder();
        let mapped = k.var("mapped", base + index);
        k.when(table.ne(0), || {
            let entry = base.min(width) + (index >> shift);
            mapped.set(k.constant(u32::MAX));
            k.when(entry.lt(width) & table_row.lt(tables), || {
                let at = table_row.to_u64() * width.to_u64() + entry.to_u64();
                let page = Global::<u32>::new(table).at_wide(at).load();
                let slot = (page << shift) | (index - ((index >> shift) << shift));
                mapped.set((page >> 31).ne(0).select(k.constant(u32::MAX), slot));
            });
        });
        mapped.get()
    }
}

/// Replaces values below the `count`-th largest of their row by -inf. Parameters: scores, counts, out; stride,
/// out_stride (u64, in elements), vocab (u32). From `vocab` on, and for counts
/// below 1, nothing is masked.
///
/// # Errors
/// If `threads` is not supported.
pub fn top_k_mask<T: Number>(name: &str, threads: u32) -> Result<Kernel, Invalid> {
    check_threads(name, threads)?;
    Builder::dependent_kernel(name, threads, |k| {
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
                Ranking::new(candidates, &stats, &value, k.constant(false), count);
                let (least, _) = candidates.threshold(&value, &|_, _| k.constant(1_u64), count.to_u64());
                writer.replace(&row, |_, x| x.ge(least).select(x, f32::NEG_INFINITY));
            },
            || writer.replace(&row, |_, _| k.constant(f32::NAN)),
        );
    })
}
