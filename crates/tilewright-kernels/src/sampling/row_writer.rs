//! Output row, written elementwise from an input row.

use super::{mass::Number, row_reader::RowReader};
use crate::tile::{Chunk, chunk};
use tilewright_ptx::{Builder, Global, Value};

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
