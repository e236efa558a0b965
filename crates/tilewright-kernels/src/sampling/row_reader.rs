//! A row that its threads read, and the output row that they write beside it.
//!
//! Partition of a row among its threads: each warp owns a contiguous range, in warp order.
//!
//! Rows have any alignment and length. The elements before the first 16-byte boundary belong to the first warp, those
//! after the last full vector to the last warp. Vectors are assigned in runs of 32 per warp, so loads are coalesced.

use super::{cta::CtaCollectives, mass::Number};
use crate::tile::{Chunk, chunk};
use tilewright_ptx::{Access, Builder, Global, Value};

/// The part of a row that [`RowReader::visit_part`] reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowPart {
    All,
    /// The elements outside of vectors, and the first loads of each thread.
    FirstLoads,
    /// The rest.
    AfterFirstLoads,
}

/// A row of `vocab` elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowReader<'k, T> {
    cta: CtaCollectives<'k>,
    begin: Global<'k, T>,
    pub(super) vocab: Value<'k, u32>,
    /// Elements before the first aligned vector.
    head: Value<'k, u32>,
    vectors: Value<'k, u32>,
    /// Vectors per warp.
    share: Value<'k, u32>,
}

impl<'k, T: Number> RowReader<'k, T> {
    #[track_caller]
    pub(super) fn new(cta: &CtaCollectives<'k>, begin: Global<'k, T>, vocab: Value<'k, u32>) -> Self {
        let threads = cta.row_threads();
        let ahead = (begin.address().low() - 1) ^ u32::MAX; // bytes, modulo 16
        let head = ((ahead & 15) / (16 / T::PER_VECTOR)).min(vocab).named("head");
        let vectors = ((vocab - head) / T::PER_VECTOR).named("vectors");
        let share = ((vectors + (threads - 1)) / threads * 32).named("share");
        Self { cta: *cta, begin, vocab, head, vectors, share }
    }

    #[track_caller]
    pub(super) fn element(&self, i: Value<'k, u32>) -> Value<'k, f32> {
        T::widen(self.begin.at(i).load())
    }

    /// The elements of the vector whose first one has this index.
    #[track_caller]
    pub(super) fn vector(&self, first: Value<'k, u32>) -> Vec<Value<'k, f32>> {
        let address = self.begin.at(first).address();
        chunk::Elements::new(address, T::DTYPE).load(T::PER_VECTOR, Access::Weak).numbers()
    }

    /// Index of the first aligned vector.
    pub(super) fn first_vector(&self) -> Value<'k, u32> {
        self.head
    }

    /// Index of the first element after the last vector.
    #[track_caller]
    fn tail(&self) -> Value<'k, u32> {
        self.head + self.vectors * T::PER_VECTOR
    }

    /// Index of the element outside of vectors that this thread owns, and whether there is one.
    #[track_caller]
    fn single(&self) -> (Value<'k, u32>, Value<'k, bool>) {
        let (warp, lane) = (self.cta.row_warp(), self.cta.k.lane());
        let first = warp.eq(0);
        let index = first.select(lane, self.tail() + lane);
        let there = (first & lane.lt(self.head)) | (warp.eq(self.cta.row_warps() - 1) & index.lt(self.vocab));
        (index, there)
    }

    /// Range of the vectors of this warp.
    #[track_caller]
    fn vectors_of_warp(&self) -> (Value<'k, u32>, Value<'k, u32>) {
        let begin = self.cta.row_warp() * self.share;
        (begin, (begin + self.share).min(self.vectors))
    }

    /// Calls `group` with the first index and the values of each vector, with `ahead` loads in flight, and `single`
    /// for the elements outside of vectors. Every lane of the warp must call this.
    #[track_caller]
    pub(super) fn visit(
        &self,
        ahead: u32,
        group: impl Fn(Value<'k, u32>, &[Value<'k, f32>]),
        single: impl Fn(Value<'k, u32>, Value<'k, f32>),
    ) {
        let k = self.cta.k;
        let if_there = |index, there, numbers: &[Value<'k, f32>]| k.when(there, || group(index, numbers));
        self.visit_part(RowPart::All, ahead, if_there, single);
    }

    /// [`Self::visit`] of a part of the row; all calls that divide a row use the same `ahead`. `group` also gets whether the
    /// vector is there: beyond the end it is a copy of another one of the warp.
    #[track_caller]
    pub(super) fn visit_part(
        &self,
        part: RowPart,
        ahead: u32,
        group: impl Fn(Value<'k, u32>, Value<'k, bool>, &[Value<'k, f32>]),
        single: impl Fn(Value<'k, u32>, Value<'k, f32>),
    ) {
        let k = self.cta.k;
        if part != RowPart::AfterFirstLoads {
            let (index, there) = self.single();
            k.when(there, || single(index, self.element(index)));
        }
        let (begin, end) = self.vectors_of_warp();
        let vectors = self.begin.at(self.head).address();
        let per_step = 32 * ahead;
        let load = |from: Value<'k, u32>| -> Vec<_> {
            let load = |i: u32| {
                let at = (from + k.lane() + 32 * i).min(end - 1);
                let address = at.to_u64().mul_add(16_u64, vectors);
                chunk::Elements::new(address, T::DTYPE).load(T::PER_VECTOR, Access::Weak)
            };
            (0..ahead).map(load).collect()
        };
        let process = |from: Value<'k, u32>, loaded: Vec<Chunk<'k>>, is_full: bool| {
            for (i, vector) in (0..).zip(loaded) {
                let at = from + k.lane() + 32_u32 * i;
                let there = if is_full { k.constant(true) } else { at.lt(end) };
                group(self.head + at * T::PER_VECTOR, there, &vector.numbers());
            }
        };
        let begin = if part == RowPart::AfterFirstLoads { begin + per_step } else { begin };
        k.when(begin.lt(end), || {
            if part == RowPart::FirstLoads {
                return process(begin, load(begin), false);
            }
            let is_short = T::PER_VECTOR == 8 && self.cta.is_short_of_registers();
            if is_short && ahead == 1 {
                // next vectors of 16-bit elements spill on sm_100
                return k.repeat((begin, end), per_step, |from| process(from, load(from), false));
            }
            let first = load(begin);
            // the next loads are carried over the end of the loop: assemblers move other loads to their uses
            let held: Vec<_> = first.iter().map(|chunk| chunk.hold()).collect();
            let current = || held.iter().map(chunk::HeldChunk::get).collect();
            // an incomplete last step of its own saves a branch per vector in the others; with few registers that is slower
            let is_split = !self.cta.is_short_of_registers();
            let full = if is_split { end - ((end - begin) & (per_step - 1)) } else { end };
            k.repeat((begin, full), per_step, |from| {
                let current = current();
                let next = load(from + per_step);
                process(from, current, is_split);
                held.iter().zip(next).for_each(|(held, next)| held.set(&next));
            });
            if is_split {
                k.when(full.lt(end), || process(full, current(), false));
            }
        });
    }

    /// Calls `body` with the first index and the values of up to 4 adjacent elements of this thread: vectors of 16-bit elements
    /// in halves, to reduce register pressure.
    #[track_caller]
    pub(super) fn each_four(&self, ahead: u32, body: impl Fn(Value<'k, u32>, &[Value<'k, f32>])) {
        let group = |first: Value<'k, u32>, numbers: &[Value<'k, f32>]| {
            (0..).step_by(4).zip(numbers.chunks(4)).for_each(|(i, numbers)| body(first + i, numbers));
        };
        self.visit(ahead, group, |index, x| body(index, &[x]));
    }

    /// Calls `body` with index and value of each element of this thread.
    #[track_caller]
    pub(super) fn each(&self, ahead: u32, body: impl Fn(Value<'k, u32>, Value<'k, f32>)) {
        self.each_four(ahead, |first, numbers| (0..).zip(numbers).for_each(|(i, &x)| body(first + i, x)));
    }

    /// Calls `body` with index and value of each element of the threads that pass `selected`.
    ///
    /// The lanes of a warp read the vectors of one selected thread together, so few selected threads cost few loads.
    /// Every lane of the warp must call this.
    #[track_caller]
    pub(super) fn each_of_threads(
        &self,
        selected: Value<'k, bool>,
        body: impl Fn(Value<'k, u32>, Value<'k, f32>),
    ) {
        let k = self.cta.k;
        let (index, there) = self.single();
        k.when(there & selected, || body(index, self.element(index)));
        let (begin, end) = self.vectors_of_warp();
        let vectors = chunk::Elements::new(self.begin.at(self.head).address(), T::DTYPE);
        let remaining = k.var("selected_lanes", k.ballot(selected));
        k.loop_(|| {
            let lanes = remaining.get();
            k.break_if(lanes.eq(0));
            let owner = k.constant(31_u32) - lanes.leading_zeros();
            remaining.set(lanes ^ (k.constant(1_u32) << owner));
            k.repeat((begin + owner + k.lane() * 32, end), 32 * 32, |at| {
                let vector = vectors.at(at * T::PER_VECTOR).load(T::PER_VECTOR, Access::Weak);
                let first = self.head + at * T::PER_VECTOR;
                (0..).zip(vector.numbers()).for_each(|(i, x)| body(first + i, x));
            });
        });
    }

    /// The warp that owns an element.
    #[track_caller]
    pub(super) fn warp_of(&self, index: Value<'k, u32>) -> Value<'k, u32> {
        let vector = (index.max(self.head) - self.head) / T::PER_VECTOR;
        (vector / self.share.max(1)).min(self.cta.row_warps() - 1)
    }

    /// Index range of a warp.
    #[track_caller]
    pub(super) fn of_warp(&self, warp: Value<'k, u32>) -> (Value<'k, u32>, Value<'k, u32>) {
        let tail = self.tail();
        let begin_of =
            |warp: Value<'k, u32>| self.head + (warp * self.share).min(self.vectors) * T::PER_VECTOR;
        let begin = warp.eq(0).select(0_u32, begin_of(warp));
        let end = warp.eq(self.cta.row_warps() - 1).select(self.vocab, begin_of(warp + 1).min(tail));
        (begin, end)
    }
}

/// Output row of `O` for an input row of `T`.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowWriter<'k, O> {
    k: &'k Builder,
    to: Global<'k, O>,
    /// Whether vector stores are aligned.
    aligned: Value<'k, bool>,
}

/// Elements per store for one input vector of `T`.
fn at_once<T: Number, O: Number>() -> u32 {
    T::PER_VECTOR.min(O::PER_VECTOR)
}

impl<'k, O: Number> RowWriter<'k, O> {
    #[track_caller]
    pub(super) fn new<T: Number>(row: &RowReader<'k, T>, to: Global<'k, O>) -> Self {
        let bytes = at_once::<T, O>() * O::DTYPE.size() as u32;
        let first = to.at(row.first_vector()).address().low();
        Self { k: first.builder(), to, aligned: (first & (bytes - 1)).eq(0) }
    }

    /// Writes `f(index, value)` for each element of `row`.
    #[track_caller]
    pub(super) fn replace<T: Number>(
        &self,
        row: &RowReader<'k, T>,
        f: impl Fn(Value<'k, u32>, Value<'k, f32>) -> Value<'k, f32>,
    ) {
        let group = |first: Value<'k, u32>, numbers: &[Value<'k, f32>]| {
            let results: Vec<_> = (0..).zip(numbers).map(|(i, &x)| f(first + i, x)).collect();
            let to = self.to.at(first);
            self.k.when_else(
                self.aligned,
                || {
                    for (i, part) in results.chunks(at_once::<T, O>() as usize).enumerate() {
                        let to = to.plus(i * part.len()).address();
                        Chunk::of(O::DTYPE, part).store(chunk::Elements::new(to, O::DTYPE));
                    }
                },
                || (0..).zip(&results).for_each(|(i, &x)| to.plus(i).store(O::narrow(x))),
            );
        };
        row.visit(1, group, |index, x| self.to.at(index).store(O::narrow(f(index, x))));
    }
}
