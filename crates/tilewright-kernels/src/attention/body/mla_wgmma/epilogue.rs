//! Epilogue of a consumer: adds the sums of both consumers and writes its half of the outputs or partial states.

use super::{CONSUMERS, consumer::MlaConsumer};
use crate::{
    attention::kernel::{
        cta::CurrentItem,
        epilogue::{ColumnRange, store_columns},
    },
    tile::reduce,
};

impl<'k> MlaConsumer<'_, 'k> {
    /// Writes this consumer's elements of the rows of an item.
    pub(super) fn store(&self, current: &CurrentItem<'k>) {
        let (k, cta) = (self.k, &self.shared.cta);
        let first_of_quad = (k.lane() & 3).eq(0);
        // all consumer threads have written their sums
        cta.sync();
        let own = self.sums(k.thread()).load_vector::<4>();
        let others = self.sums(k.thread() ^ (CONSUMERS / 2)).load_vector::<4>();
        for half in 0..2 {
            let sum = reduce::quad_sum(own[half] + others[half]);
            let error = reduce::quad_sum(own[2 + half] + others[2 + half]);
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
}
