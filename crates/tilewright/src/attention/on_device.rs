//! Optional operators on data in device memory: plans from batch lengths, and packing of flags into bits.

use super::{Attention, BitOrder, Index, Plan};
use crate::{Backend, Error, Result, tensor::DeviceMemory};
use std::sync::Arc;

/// A paged batch in device memory: i32 arrays, sized for the capacity of the plan. The plan holds a reference to each. The host
/// does not see their contents: the kernel checks all of them except the page indices, which must be valid pages of the cache.
#[derive(Debug, Clone)]
pub struct DeviceBatch {
    /// `[1]`: the number of requests, at most the capacity's.
    pub num_requests: Arc<DeviceMemory>,
    /// `[num_requests + 1]`: request `r` has query rows `qo_indptr[r]..qo_indptr[r + 1]`.
    pub qo_indptr: Arc<DeviceMemory>,
    /// The pages of each request.
    pub pages: DevicePages,
}

/// Pages and lengths in device memory.
#[derive(Debug, Clone)]
pub enum DevicePages {
    /// Lists of pages, as in [`crate::PageTable`]. Planning copies the page indices into the plan. `kv_indptr` may start above 0,
    /// and requests without pages may have any `last_page_len`.
    Lists {
        /// `[num_requests + 1]`
        kv_indptr: Arc<DeviceMemory>,
        /// `[num_requests]`
        last_page_len: Arc<DeviceMemory>,
        /// As many as the capacity has pages: `kv_indptr[num_requests]` of them are used.
        indices: Arc<DeviceMemory>,
    },
    /// A block table, which runs read in place. The capacity of the plan in pages has no effect and may be 0.
    BlockTable {
        /// `[num_requests]`: tokens of each request, at most `columns` pages of them.
        seq_lens: Arc<DeviceMemory>,
        /// `[num_requests, columns]`: row `r` begins with the pages of request `r`.
        block_tables: Arc<DeviceMemory>,
        /// Columns of `block_tables`.
        columns: usize,
    },
}

impl<B: Backend> Attention<B> {
    /// Binds `plan` to a batch on the device, and plans it. `plan` comes from [`Attention::plan_with_capacity`] with any paged
    /// batch, for example an empty one. The tensors of its runs have as many rows as the capacity. A plan that is bound to another
    /// batch is bound anew with one launch, which does not block and can be recorded.
    ///
    /// # Errors
    /// When the backend does not plan on the device, the plan has no fixed capacity or exceeds the limits of the backend, or an
    /// array is too short or in other memory. The error lists all reasons, and the plan is unchanged.
    pub fn plan_on_device(&self, plan: &mut Plan, batch: DeviceBatch) -> Result<()> {
        self.backend.plan_on_device(plan, batch)
    }

    /// Plans the current contents of the batch's arrays with one launch, after a copy of lists of pages. It does not block and can
    /// be recorded.
    ///
    /// # Errors
    /// When the plan is not one of [`Attention::plan_on_device`], or the device rejects the launch.
    pub fn replan_on_device(&self, plan: &Plan) -> Result<()> {
        self.backend.replan_on_device(plan)
    }

    /// The errors of the last planning, as bits of the backend; 0 if none. After an error the plan has no requests. Waits for
    /// the device.
    ///
    /// # Errors
    /// When the plan is not one of [`Attention::plan_on_device`], and errors of the device's work.
    pub fn refusals_on_device(&self, plan: &Plan) -> Result<u32> {
        self.backend.refusals_on_device(plan)
    }
}

/// [`super::packbits`] of flags in device memory (u8, nonzero is set).
///
/// # Errors
/// As for [`segment_packbits_on_device`].
pub fn packbits_on_device<B: Backend + ?Sized>(
    backend: &B,
    flags: &DeviceMemory,
    order: BitOrder,
) -> Result<DeviceMemory> {
    let Ok(end) = i32::try_from(flags.bytes()) else {
        let text = format!("flags = {}, expected at most {}", flags.bytes(), i32::MAX);
        return Err(Error::new("attention.segment_packbits", text));
    };
    Ok(segment_packbits_on_device(backend, flags, &[0, end], order)?.0)
}

/// [`super::segment_packbits`] of flags in device memory (u8, nonzero is set). Returns the bytes and their bounds,
/// `[num_segments + 1]`.
///
/// # Errors
/// When the backend does not have this operator, `indptr` is empty, does not start at 0, decreases or does not end at the number
/// of flags, a segment is longer than the backend supports, the flags are in other memory, or memory is exhausted.
pub fn segment_packbits_on_device<B: Backend + ?Sized>(
    backend: &B,
    flags: &DeviceMemory,
    indptr: &[i32],
    order: BitOrder,
) -> Result<(DeviceMemory, Vec<i32>)> {
    Index::from(indptr).segments("attention.segment_packbits", flags.bytes())?;
    backend.segment_packbits(flags, indptr, order)
}
