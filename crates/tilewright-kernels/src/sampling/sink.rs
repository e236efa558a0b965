//! A row that is written, number by number of a row that is read.

use super::{number::Number, row::Row};
use tilewright_ptx::build::{Builder, Global, Value};

/// A row of elements `O`, for one of elements `T`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sink<'k, O> {
    k: &'k Builder,
    to: Global<'k, O>,
    /// Whether what becomes of a vector is aligned to all of it, or to 16 bytes.
    aligned: Value<'k, bool>,
}

/// Words that become of a vector of `T`, and how many of them are stored at once.
fn words_of<T: Number, O: Number>() -> (usize, usize) {
    let words = (4 * T::PER_VECTOR / O::PER_VECTOR) as usize;
    (words, words.min(4))
}

impl<'k, O: Number> Sink<'k, O> {
    #[track_caller]
    pub(super) fn new<T: Number>(row: &Row<'k, T>, to: Global<'k, O>) -> Self {
        let bytes = 4 * words_of::<T, O>().1 as u32;
        let first = to.at(row.first_vector()).address().low();
        Self { k: first.builder(), to, aligned: (first & (bytes - 1)).eq(0) }
    }

    /// Writes `f` of the place of each number of `row`, and of the number.
    #[track_caller]
    pub(super) fn replace<T: Number>(
        &self,
        row: &Row<'k, T>,
        f: impl Fn(Value<'k, u32>, Value<'k, f32>) -> Value<'k, f32>,
    ) {
        let group = |first: Value<'k, u32>, numbers: &[Value<'k, f32>]| {
            let results: Vec<_> = (0..).zip(numbers).map(|(i, &x)| f(first + i, x)).collect();
            let to = self.to.at(first);
            self.k.when_else(
                self.aligned,
                || self.store_words::<T>(to, &results),
                || (0..).zip(&results).for_each(|(i, &x)| to.plus(i).store(O::of(x))),
            );
        };
        row.visit(1, group, |place, x| self.to.at(place).store(O::of(f(place, x))));
    }

    #[track_caller]
    fn store_words<T: Number>(&self, to: Global<'k, O>, numbers: &[Value<'k, f32>]) {
        let (words, at_once) = words_of::<T, O>();
        let per = O::PER_VECTOR as usize;
        let padded: Vec<_> =
            numbers.iter().copied().cycle().take(numbers.len().next_multiple_of(per)).collect();
        let packed: Vec<_> = padded.chunks(per).flat_map(|numbers| O::pack(self.k, numbers)).collect();
        let to = to.cast::<u32>();
        for at in (0..words).step_by(at_once) {
            match at_once {
                2 => to.plus(at).store_vector::<2>([packed[at], packed[at + 1]]),
                _ => to.plus(at).store_vector::<4>(std::array::from_fn(|i| packed[at + i])),
            }
        }
    }
}
