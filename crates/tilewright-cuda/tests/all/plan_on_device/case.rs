//! Batches with the problem, tiling and capacity to plan them for.

use crate::{generator::Generator, paged_requests::PagedRequests};
use tilewright::{
    Batch, Dtype, HeadDim, Heads, Mask, PageTable, Plan, Problem,
    attention::{Capacity, Planner, Split, Tiling},
};
use tilewright_kernels::attention::{
    params::{PlanArrays, UNLIMITED},
    plan_device::{KvLengths, PlanConfig, PlanDeviceParams},
};

/// A problem, a tiling, and a batch with its capacity.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) heads: Heads,
    pub(crate) mask: Mask,
    pub(crate) tiling: Tiling,
    pub(crate) capacity: Capacity,
    pub(crate) page_size: usize,
    pub(crate) num_requests: i32,
    pub(crate) qo_indptr: Vec<i32>,
    pub(crate) kv_indptr: Vec<i32>,
    pub(crate) last_page_len: Vec<i32>,
    /// Columns of the block table, if the device has one.
    pub(crate) columns: Option<u32>,
}

impl Case {
    pub(crate) fn new(lens: &[(usize, usize)], page_size: usize) -> Self {
        let PagedRequests { qo_indptr, kv_indptr, last_page_len, .. } = PagedRequests::new(lens, page_size);
        let tiling = Tiling {
            q_rows: 64,
            kv_heads: 1,
            kv_tokens: 64,
            segment_overhead: 3,
            cut_overhead: 6,
            tile_load: 16,
            workers: 132,
            shares: 132,
            scratch: 0,
            weights: Dtype::Bf16,
            many_rows: None,
        };
        let (rows, pages) = (qo_indptr[lens.len()] as usize, kv_indptr[lens.len()] as usize);
        let capacity = Capacity::new(lens.len() + 3, rows + 7, pages + 5).with_kv_len(1 << 20);
        let num_requests = lens.len() as i32;
        let (heads, mask) = (Heads { qo: 8, kv: 2 }, Mask::Causal);
        Self {
            heads,
            mask,
            tiling,
            capacity,
            page_size,
            num_requests,
            qo_indptr,
            kv_indptr,
            last_page_len,
            columns: None,
        }
    }

    /// The same with keys in a block table on the device, with `spare` columns more than needed.
    pub(crate) fn in_block_table(mut self, spare: u32) -> Self {
        let pages = self.kv_indptr.windows(2).map(|bounds| bounds[1] - bounds[0]);
        self.columns = Some(pages.max().unwrap_or(0).cast_unsigned() + spare);
        self
    }

    pub(crate) fn draw(generator: &mut Generator) -> Self {
        let (longest_qo, longest_kv) = (generator.pick(&[1, 1, 4, 30]), generator.pick(&[5, 300, 3000]));
        let most = generator.pick(&[2, 10, 60]);
        let count = generator.below(most);
        let lens: Vec<_> =
            (0..count).map(|_| (generator.below(longest_qo + 1), generator.below(longest_kv + 1))).collect();
        let equal = generator.below(3) == 0;
        let lens = if equal { vec![*lens.first().unwrap_or(&(1, 70)); lens.len()] } else { lens };
        let mut case = Self::new(&lens, generator.pick(&[1, 5, 16]));
        let kv = generator.pick(&[1, 2, 8]);
        case.heads = Heads { qo: kv * generator.pick(&[1, 3, 4]), kv };
        let windows = [(0, Some(0)), (70, Some(0)), (20, Some(30)), (100, None)];
        let (left, right) = generator.pick(&windows);
        case.mask = generator.pick(&[Mask::Causal, Mask::Full, Mask::Window { left, right }]);
        case.tiling.q_rows = generator.pick(&[1, 16, 64]);
        case.tiling.kv_tokens = generator.pick(&[16, 64]);
        case.tiling.segment_overhead = 1 + generator.below(4);
        case.tiling.cut_overhead = generator.below(9);
        case.tiling.tile_load = generator.below(20);
        case.tiling.workers = generator.pick(&[1, 2, 7, 132, 264]);
        if generator.below(2) == 0 { case.in_block_table(generator.below(3) as u32) } else { case }
    }

    /// Plan of the host, within the capacity.
    pub(crate) fn plan(&self) -> Plan {
        let problem = Problem::builder(self.heads, HeadDim::same(8)).mask(self.mask).build().unwrap();
        let indices: Vec<i32> = (0..self.kv_indptr[self.kv_indptr.len() - 1]).collect();
        let table = PageTable::new(&self.kv_indptr, &indices, &self.last_page_len, self.page_size);
        let batch = Batch::paged(&self.qo_indptr, table);
        Planner::new(problem, self.tiling)
            .plan_with_capacity(&self.capacity, &batch, Split::Balanced)
            .unwrap()
    }

    /// The arguments of the kernel, with the batch's arrays in new memory.
    pub(crate) fn params(
        &self,
        upload: &mut dyn FnMut(&[i32]) -> u64,
        plan: PlanArrays,
        flags: u64,
    ) -> PlanDeviceParams {
        let keys = match self.columns {
            None => KvLengths::Pages {
                kv_indptr: upload(&self.kv_indptr),
                last_page_len: upload(&[&self.last_page_len[..], &[0]].concat()),
            },
            Some(columns) => {
                let lens = self.kv_indptr.windows(2).zip(&self.last_page_len).map(|(bounds, last)| {
                    (bounds[1] - bounds[0] - 1) * self.page_size as i32 * i32::from(bounds[1] > bounds[0])
                        + last
                });
                KvLengths::BlockTable { seq_lens: upload(&lens.chain([0]).collect::<Vec<_>>()), columns }
            }
        };
        let (num_requests, qo_indptr) = (upload(&[self.num_requests]), upload(&self.qo_indptr));
        PlanDeviceParams { num_requests, qo_indptr, keys, plan, flags, config: self.shape() }
    }

    pub(crate) fn shape(&self) -> PlanConfig {
        let (left, right) = match self.mask {
            Mask::Full => (UNLIMITED, UNLIMITED),
            Mask::Causal => (UNLIMITED, 0),
            Mask::Window { left, right } => (left, right.unwrap_or(UNLIMITED)),
        };
        let Capacity { requests, rows, qo_len, kv_len, pages, .. } = self.capacity;
        PlanConfig {
            group: self.heads.group() as u32,
            kv_heads: self.heads.kv as u32,
            page_size: self.page_size as u32,
            left,
            right,
            tile: (self.tiling.q_rows / self.heads.group()).max(1) as u32,
            kv_tokens: self.tiling.kv_tokens as u32,
            segment_overhead: self.tiling.segment_overhead as u32,
            cut_overhead: self.tiling.cut_overhead as u32,
            tile_load: self.tiling.tile_load as u32,
            workers: self.tiling.workers as u32,
            capacity: [requests, rows, qo_len, pages, kv_len].map(|count| count as u32),
        }
    }
}
