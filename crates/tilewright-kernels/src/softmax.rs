//! Softmax over rows of f32 logits, each with its temperature: two reads, the first of which finds the greatest and the sum
//! together, and one write.
//!
//! ```text
//! p_i = 2^((x_i - max x) · log2 e / temperature) / Σ
//! ```
//!
//! At temperature 0 all is on the first of the greatest. A row with NaN or +inf, or of -inf alone, becomes NaN.
//! Shapes: logits, out `[rows, vocab]` f32, dense, aligned to 16 bytes as a whole; temperature `[rows]` f32, finite and not negative.
//! Rows of odd lengths begin anywhere: up to three numbers at each end are treated alone, the others four at a time.
//! Grid: `[rows, 1, 1]`.

use crate::tile::reduce;
use std::f32::consts::LOG2_E;
use tilewright_ptx::{
    build::{Builder, Global, Shared, Value, Var},
    ir::Kernel,
    isa::{
        memory::{Access, AtomicOp, Order, Scope},
        warp::WarpReduction,
    },
    verify::Invalid,
};

const THREADS: u32 = 512;
/// Vectors of four that a thread asks for at once.
const EACH: u32 = 4;

/// What a kernel is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Softmax {
    /// Numbers of a row.
    pub vocab: u32,
}

/// The kernel. Parameters: logits, temperature, out. `out` may be `logits`.
///
/// # Errors
/// When rows have no numbers, or more than 2^30.
pub fn softmax(name: &str, config: Softmax) -> Result<Kernel, Invalid> {
    let vocab = config.vocab;
    if !(1..=1 << 30).contains(&vocab) {
        return Err(Invalid::of(name, format!("vocab = {vocab}, expected 1..={}", 1 << 30)));
    }
    Builder::kernel(name, THREADS, |k| {
        let (logits, temperature) = (k.global::<f32>("logits"), k.global::<f32>("temperature"));
        let row = Row::new(k, vocab, (logits, k.global::<f32>("out")));
        let temperature = temperature.at(k.cta()).load();
        let greedy = temperature.eq(0.0);
        // a scale of infinity times a distance of 0 would be NaN
        let scale = (temperature.unless(greedy, 1.0).recip() * LOG2_E).min(f32::MAX);
        let (max, sum) = row.max_and_sum(scale);
        // false for NaN, too
        let factor = sum.gt(0.0).select(sum.recip(), f32::NAN);
        k.when_else(
            greedy,
            || {
                let first = row.first_of(max);
                let one = factor.is_nan().select(f32::NAN, 1.0);
                let none = one * 0.0; // NaN where that is
                row.replace(|i, _| i.eq(first).select(one, none));
            },
            || row.replace(|_, x| ((x - max) * scale).exp2() * factor),
        );
    })
}

/// A row, cut into at most three numbers, vectors of four, and at most three numbers.
struct Row<'k> {
    k: &'k Builder,
    thread: Value<'k, u32>,
    vocab: u32,
    from: Global<'k, f32>,
    to: Global<'k, f32>,
    /// Numbers before the first vector, and vectors.
    head: Value<'k, u32>,
    vectors: Value<'k, u32>,
    maxima: Shared<'k, f32>,
    sums: Shared<'k, f32>,
    first: Shared<'k, u32>,
}

impl<'k> Row<'k> {
    #[track_caller]
    fn new(k: &'k Builder, vocab: u32, (logits, out): (Global<'k, f32>, Global<'k, f32>)) -> Self {
        let begin = k.cta().to_u64() * u64::from(vocab);
        let head = match vocab % 4 {
            0 => k.constant(0),
            _ => ((begin.low() ^ 3) + 1) & 3,
        };
        let head = head.min(vocab);
        let warps = THREADS as usize / 32;
        Self {
            k,
            thread: k.thread(),
            vocab,
            from: logits.at_wide(begin),
            to: out.at_wide(begin),
            head,
            vectors: (k.constant(vocab) - head) >> 2,
            maxima: k.shared("maxima", warps, 4),
            sums: k.shared("sums", warps, 4),
            first: k.shared("first", 1, 4),
        }
    }

    /// Calls `each` with the place of this thread's number of those outside of vectors, in the threads that have one.
    #[track_caller]
    fn single(&self, each: impl FnOnce(Value<'k, u32>)) {
        if self.vocab.is_multiple_of(4) {
            return;
        }
        let behind = self.head + (self.vectors << 2);
        let place = self.thread.lt(self.head).select(self.thread, self.thread - self.head + behind);
        self.k.when(place.lt(self.vocab), || each(place));
    }

    /// Calls `each` with a batch of this thread's vectors, one batch after the other.
    #[track_caller]
    fn batches(&self, each: impl Fn(&[Four<'k>])) {
        const BATCH: u32 = THREADS * EACH;
        let (k, aligned) = (self.k, self.head);
        let batch = |first: Value<'k, u32>, vectors: Value<'k, u32>| {
            let four = |i| {
                let vector = first + i * THREADS;
                Four { place: aligned + (vector << 2), is_there: vector.lt(vectors) }
            };
            each(&(0..EACH).map(four).collect::<Vec<_>>());
        };
        let whole = self.vectors / BATCH * BATCH;
        k.repeat((self.thread, whole), BATCH, |first| batch(first, k.constant(u32::MAX)));
        k.when(whole.lt(self.vectors), || batch(whole + self.thread, self.vectors));
    }

    /// The numbers of those of four that are there, otherwise -inf.
    #[track_caller]
    fn load(&self, fours: &[Four<'k>]) -> Vec<[Value<'k, f32>; 4]> {
        let load = |four: &Four<'k>| {
            let numbers: [_; 4] = std::array::from_fn(|_| self.k.var::<f32>("x", f32::NEG_INFINITY));
            self.k.when(four.is_there, || {
                let loaded = self.from.at(four.place).load_vector_with::<4>(Access::Streaming);
                numbers.iter().zip(loaded).for_each(|(number, loaded)| number.set(loaded));
            });
            numbers.map(Var::get)
        };
        fours.iter().map(load).collect()
    }

    /// The greatest number, and the sum of `2^((x - greatest) · scale)`, the same in all threads.
    #[track_caller]
    fn max_and_sum(&self, scale: Value<'k, f32>) -> (Value<'k, f32>, Value<'k, f32>) {
        let (k, online) = (self.k, Online::new(self.k, scale));
        self.batches(|fours| online.add(&self.load(fours).concat()));
        self.single(|i| online.add(&[self.from.at(i).load()]));
        let (max, sum) = (online.max.get(), online.sum.get());
        let greatest =
            reduce::over_cta(k, (self.maxima, THREADS), max, |x| reduce::warp_max(x), |a, b| a.max(b));
        let sum = sum * ((max - finite(greatest)) * scale).exp2();
        let sum = reduce::over_cta(k, (self.sums, THREADS), sum, |x| reduce::warp_sum(x), |a, b| a + b);
        (greatest, sum)
    }

    /// Where the first number that is `max` stands, the same in all threads.
    #[track_caller]
    fn first_of(&self, max: Value<'k, f32>) -> Value<'k, u32> {
        let (k, of_thread) = (self.k, self.k.var("first", u32::MAX));
        let found =
            |place, x: Value<'k, f32>| of_thread.set(of_thread.get().min(x.eq(max).select(place, u32::MAX)));
        self.batches(|fours| {
            for (four, numbers) in fours.iter().zip(self.load(fours)) {
                (0..4).zip(numbers).for_each(|(i, x)| {
                    found(four.is_there.select(four.place + i, u32::MAX), x);
                });
            }
        });
        self.single(|i| found(i, self.from.at(i).load()));
        k.when(self.thread.eq(0), || self.first.store(u32::MAX));
        k.sync_threads();
        let of_warp = k.reduce_warp(WarpReduction::MinU32, of_thread.get());
        k.when((self.thread & 31).eq(0), || {
            self.first.reduce(AtomicOp::MinU32, of_warp, (Order::Relaxed, Scope::Cta));
        });
        k.sync_threads();
        self.first.load()
    }

    /// Writes `f` of the place of each number, and of the number.
    #[track_caller]
    fn replace(&self, f: impl Fn(Value<'k, u32>, Value<'k, f32>) -> Value<'k, f32>) {
        self.batches(|fours| {
            for (four, numbers) in fours.iter().zip(self.load(fours)) {
                let results = std::array::from_fn(|i| f(four.place + i as u32, numbers[i]));
                self.k.when(four.is_there, || self.to.at(four.place).store_vector::<4>(results));
            }
        });
        self.single(|i| self.to.at(i).store(f(i, self.from.at(i).load())));
    }
}

/// Four numbers side by side, aligned to 16 bytes.
#[derive(Clone, Copy)]
struct Four<'k> {
    /// The first of them.
    place: Value<'k, u32>,
    is_there: Value<'k, bool>,
}

/// The greatest number so far, and the sum of `2^((x - greatest) · scale)`.
struct Online<'k> {
    scale: Value<'k, f32>,
    max: Var<'k, f32>,
    sum: Var<'k, f32>,
}

impl<'k> Online<'k> {
    #[track_caller]
    fn new(k: &'k Builder, scale: Value<'k, f32>) -> Self {
        Self { scale, max: k.var("max", f32::NEG_INFINITY), sum: k.var("sum", 0.0) }
    }

    #[track_caller]
    fn add(&self, numbers: &[Value<'k, f32>]) {
        let before = self.max.get();
        let max = numbers.iter().fold(before, |max, &x| max.max(x));
        let reference = finite(max);
        let scaled = self.sum.get() * ((before - reference) * self.scale).exp2();
        let sum = numbers.iter().fold(scaled, |sum, &x| sum + ((x - reference) * self.scale).exp2());
        self.max.set(max);
        self.sum.set(sum);
    }
}

/// 0 in the place of -inf: (-inf) - (-inf) would be NaN.
#[track_caller]
fn finite(max: Value<'_, f32>) -> Value<'_, f32> {
    max.unless(max.eq(f32::NEG_INFINITY), 0.0)
}
