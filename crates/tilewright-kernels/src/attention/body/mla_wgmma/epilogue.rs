//! Epilogue of a consumer: adds the sums of both consumers and writes its half of the outputs or partial states.

use super::consumer::Consumer;
use crate::{
    attention::kernel::{
        cta::CurrentItem,
        epilogue::{ColumnRange, store_columns},
    },
    tile::{reduce, sums},
};
use tilewright_ptx::build::{Shared, Value};

impl<'k> Consumer<'_, 'k> {
    /// Writes this consumer's elements of the rows of an item.
    pub(super) fn store(&self, current: &CurrentItem<'k>) {
        let (k, cta) = (self.k, &self.shared.cta);
        let first_of_quad = (k.lane() & 3).eq(0);
        let own = [0, 1].map(|half| [reduce::quad_sum(self.sum[half].get()), self.error[half].get()]);
        k.when(first_of_quad, || {
            (0..2).for_each(|half| self.sums(self.number).plus(16 * half).store_vector(own[half]));
        });
        cta.sync();
        for half in 0..2 {
            let [sum, error] = self.sums(self.number ^ 1).plus(16 * half).load_vector::<2>();
            let (sum, error) = (own[half][0] + sum, own[half][1] + error);
            // the largest weights are rounded in outputs
            let rounding = (sum * (sum + error).recip()).unless(sum.eq(0.0), 1.0);
            let of_half = self.state.o.iter().flat_map(|of| [of[2 * half], of[2 * half + 1]]);
            of_half.for_each(|o| o.set(o.get() * rounding));
            // the epilogue adds the sums of a quad
            self.sum[half].set(sum.unless(!first_of_quad, 0.0));
        }
        let first = self.number * self.shared.config.half() as u32;
        let columns = ColumnRange { first, with_lse: self.number.eq(0) };
        let rows = (self.shared.first_row(), self.first_row());
        store_columns((cta, current, self.hooks), &self.state, rows, columns);
    }

    /// The sums of weights and rounding errors of this thread's first row in a consumer.
    fn sums(&self, consumer: Value<'k, u32>) -> Shared<'k, f32> {
        let row = (consumer << 6) + sums::first_row(self.k.thread());
        self.shared.cta.at::<f32>(self.shared.arena.sums).at(row << 1)
    }
}
