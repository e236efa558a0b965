//! Device form of a schedule: work items, merges and their partial states, as words in device memory.
//!
//! All words are 32 bits, little endian. A plan's arrays:
//!
//! | array | element |
//! |---|---|
//! | `items` | [`WorkItem`], in the order of workers |
//! | `worker_indptr` `[workers + 1]` | worker `w` (CTA `w`) executes `items[worker_indptr[w]..worker_indptr[w + 1]]` |
//! | `merge_deps` | merge numbers; `merge_deps[item.merge_deps_begin..item.merge_deps_end]` depend on an item |
//! | `merges` | [`MergeItem`] |
//! | `sources` | [`MergeSource`]; those of a merge in accumulation order |
//! | `arrival_counters` `[merges]` | arrivals per merge: 0 before and after a run |
//! | `requests` | [`RequestRows`], in row order |
//!
//! Rows are query tokens, counted over the whole batch. The state of (row, query head `g` of the group) is in partial row
//! `partial + (row - qo_begin) * group + g`.

use tilewright_ptx::{
    build::{Builder, Global, Pointer, Shared, Value, Var},
    isa::types::Scalar,
};

/// Absent value: all bits are 1.
pub const NONE: u32 = u32::MAX;

/// Declares a record: the host struct, which is converted to words, and its device form, which is loaded into registers.
macro_rules! record {
    ($(#[$doc:meta])* $name:ident, $(#[$regs_doc:meta])* $regs:ident, $words:literal:
        $($(#[$field_doc:meta])* $field:ident: $ty:ident,)*) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct $name { $($(#[$field_doc])* pub $field: $ty,)* }

        $(#[$regs_doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $regs<'k> { $($(#[$field_doc])* pub $field: Value<'k, $ty>,)* }

        impl $name {
            /// Words per record.
            pub const WORDS: usize = $words;
            /// Bytes per record.
            pub const BYTES: usize = 4 * $words;

            /// The record in device layout; words beyond its fields are 0.
            #[inline]
            pub fn to_words(&self) -> [u32; $words] {
                let mut words = [0; $words];
                let fields = [$(word::$ty(self.$field)),*];
                words[..fields.len()].copy_from_slice(&fields);
                words
            }
        }

        impl<'k> $regs<'k> {
            /// Loads record `index` of `records`. Equal indices give equal results in all threads.
            #[track_caller]
            pub fn load(k: &'k Builder, records: Global<'k, u32>, index: Value<'k, u32>) -> Self {
                let _line = k.at_line(std::panic::Location::caller());
                Self::from_words(k, load_words::<$words, u64>(records.at_wide(index.to_u64() * $words)))
            }

            /// Loads the record from shared memory.
            #[track_caller]
            pub fn load_shared(k: &'k Builder, record: Shared<'k, u32>) -> Self {
                let _line = k.at_line(std::panic::Location::caller());
                Self::from_words(k, load_words::<$words, u32>(record))
            }

            fn from_words(k: &'k Builder, words: Vec<Value<'k, u32>>) -> Self {
                let mut words = words.into_iter();
                let mut next = || words.next().unwrap_or_else(|| k.constant(0));
                Self { $($field: next().reinterpret::<$ty>().named(stringify!($field)),)* }
            }
        }
    };
}

/// Conversion of a field to a word.
mod word {
    pub(super) fn u32(field: u32) -> u32 {
        field
    }
    pub(super) fn i32(field: i32) -> u32 {
        field.cast_unsigned()
    }
}

record! {
    /// A unit of work: query rows of one KV head against a range of keys of one segment. 16 words.
    WorkItem,
    /// A [`WorkItem`] in registers.
    WorkItemRegs, 16:
    /// The first row.
    qo_begin: u32,
    /// Rows (query tokens).
    qo_len: u32,
    /// The KV head; its query heads are `kv_head * group..(kv_head + 1) * group`.
    kv_head: u32,
    /// The request of the rows, or [`NONE`]: the rows belong to several, and each is looked up in `requests`.
    request: u32,
    /// The position of row `r` is `r + offset`. If `request` is [`NONE`], the request of row `r` is `r + offset` where each has one row.
    offset: i32,
    /// The first key, counted from the segment's first.
    kv_begin: u32,
    /// One past the last key, counted likewise.
    kv_end: u32,
    /// Keys of the segment.
    kv_len: u32,
    /// The first entry of the segment in the page indices or, in a ragged tensor, its first token.
    kv_start: u32,
    /// The position of the segment's first key; unused in block-sparse attention.
    base: u32,
    /// The first partial row, or [`NONE`]: the item writes the output itself.
    partial: u32,
    /// The first entry of `merge_deps` of this item.
    merge_deps_begin: u32,
    /// One past the last.
    merge_deps_end: u32,
    /// Columns of the segment's mask bits, which cover its last keys; 0 without mask bits.
    mask_columns: u32,
    /// The low word of the bit index of row `qo_begin` and the first column.
    mask_bit_low: u32,
    /// The high word of that index.
    mask_bit_high: u32,
}

record! {
    /// Rows of one KV head, and the partial states that are merged into their output. 8 words.
    MergeItem,
    /// A [`MergeItem`] in registers.
    MergeItemRegs, 8:
    /// The KV head.
    kv_head: u32,
    /// The first row.
    qo_begin: u32,
    /// Rows.
    qo_len: u32,
    /// The first of `sources`.
    source_begin: u32,
    /// One past the last.
    source_end: u32,
    /// Items that arrive; 0 if a launch of its own performs the merge.
    arrivals: u32,
    /// 1 if the sources are two items that arrive, have the rows of the merge, and arrive at no other merge; otherwise 0.
    is_pair: u32,
}

record! {
    /// The partial states of a work item. 2 words.
    MergeSource,
    /// A [`MergeSource`] in registers.
    MergeSourceRegs, 2:
    /// The item's first partial row.
    partial: u32,
    /// The item's first row.
    qo_begin: u32,
}

record! {
    /// The rows of a request. 2 words.
    RequestRows,
    /// [`RequestRows`] in registers.
    RequestRowsRegs, 2:
    /// One past the last row of the request.
    end: u32,
    /// Offset from row number to position.
    offset: i32,
}

/// Loads `N` words by vectors of four, or of two if `N` is 2. The address must be aligned to the vector.
#[track_caller]
fn load_words<const N: usize, A: Scalar>(at: Pointer<'_, u32, A>) -> Vec<Value<'_, u32>> {
    match N {
        2 => at.load_vector::<2>().to_vec(),
        _ => (0..N / 4).flat_map(|i| at.plus(4 * i).load_vector::<4>()).collect(),
    }
}

/// The request of rows as far as an item determines it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KnownRequest<'k> {
    /// The request, or [`NONE`] if the rows are of several.
    pub(crate) request: Value<'k, u32>,
    /// Its offset: positions are tokens plus the offset.
    pub(crate) offset: Value<'k, i32>,
}

/// The requests of a batch.
#[derive(Debug, Clone, Copy)]
pub struct RequestTable<'k> {
    /// `[count]` [`RequestRows`].
    pub rows: Global<'k, u32>,
    /// Number of requests.
    pub count: Value<'k, u32>,
}

impl<'k> RequestTable<'k> {
    /// The request of `row`: the first whose end is beyond it, or the last. It is `guess`, or is found by binary search.
    #[track_caller]
    pub fn find(self, row: Value<'k, u32>, guess: Value<'k, u32>) -> Value<'k, u32> {
        let k = row.builder();
        let _line = k.at_line(std::panic::Location::caller());
        let end =
            |request: Value<'k, u32>| self.rows.at_wide(request.to_u64() * RequestRows::WORDS as u64).load();
        let last = self.count - 1;
        let guess = guess.min(last);
        let begin = end(guess.max(1) - 1).unless(guess.eq(0), 0);
        let is_right = begin.le(row) & end(guess).gt(row);
        let low = k.var::<u32>("low", is_right.select(guess, 0));
        let high = k.var::<u32>("high", is_right.select(guess, last));
        k.loop_(|| {
            k.break_if(low.get().ge(high.get()));
            let middle = (low.get() + high.get()) >> 1;
            let beyond = end(middle).gt(row);
            let (new_low, new_high) =
                (beyond.select(low.get(), middle + 1), beyond.select(middle, high.get()));
            low.set(new_low);
            high.set(new_high);
        });
        low.get()
    }

    /// Looks up the request of a row if its item has rows of several, that is, if the `known` request is [`NONE`]. Sets `offset`, and
    /// `request` if passed. Otherwise both keep their values. The sum of the row and the first `offset` is tried first.
    #[track_caller]
    pub fn look_up(
        self,
        row: Value<'k, u32>,
        known: Value<'k, u32>,
        request: Option<Var<'k, u32>>,
        offset: Var<'k, i32>,
    ) {
        let k = row.builder();
        let _line = k.at_line(std::panic::Location::caller());
        k.when(known.eq(NONE), || {
            let of = self.find(row, row + offset.get().reinterpret::<u32>());
            if let Some(request) = request {
                request.set(of);
            }
            let record = self.rows.at_wide(of.to_u64() * RequestRows::WORDS as u64);
            offset.set(record.plus(1).load().reinterpret::<i32>());
        });
    }
}
