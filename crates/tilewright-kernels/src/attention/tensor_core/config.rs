//! Kernel configuration: dtypes, head dims, device, and the tile sizes and shared memory that follow from them.

use super::layout::Layout;
use crate::attention::call::Call;
use tilewright::{Dtype, HeadDim};

/// Threads per CTA.
pub const THREADS: u32 = 128;
/// Keys per KV tile.
pub const KV_TOKENS: usize = 64;
/// Maximum query rows (tokens times heads of the group) of an item whose keys are divided among warps.
pub const FEW_ROWS: usize = 16;

/// Device properties that a kernel depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Device {
    /// The compute capability, 90 for 9.0.
    pub arch: u32,
    /// Maximum bytes of shared memory per CTA.
    pub shared_of_cta: usize,
    /// Bytes of shared memory per SM; the system reserves 1,024 of them per CTA.
    pub shared_of_sm: usize,
}

impl Device {
    /// Properties of an architecture ("CUDA C++ programming guide", technical specifications per compute capability).
    pub fn of_arch(arch: u32) -> Self {
        let kib = match arch {
            80 | 87 => 164,
            90..=110 => 228,
            _ => 100,
        };
        Self { arch, shared_of_cta: (kib - 1) << 10, shared_of_sm: kib << 10 }
    }
}

/// The item bodies that a kernel contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Items {
    /// Only the body for items of at most [`MAX_SPLIT_KV_ROWS`] rows, for decoding: a third of the code and of the JIT time.
    Few,
    /// Both bodies, for items of any size.
    Any,
}

/// Compile-time configuration of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Config {
    /// The dtype of queries and outputs: f16 or bf16. Softmax weights are rounded to it.
    pub qo: Dtype,
    /// The dtype of keys and values: that of queries, or an 8-bit one.
    pub kv: Dtype,
    /// Elements per head.
    pub head_dim: HeadDim,
    /// Item bodies in the kernel.
    pub items: Items,
    /// The target device.
    pub device: Device,
}

/// Row tiles per warp, and shared memory reserved outside of the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Needs {
    /// Reserved bytes of shared memory.
    pub(super) bytes: usize,
    /// [`MmaConfig::row_tiles`] or fewer.
    pub(super) row_tiles: usize,
}

impl Config {
    /// Query rows per tile: the value for `Tiling::q_rows`. Larger items are processed tile by tile.
    pub fn q_rows(&self) -> usize {
        64 * self.row_tiles()
    }

    /// Row tiles of 16 rows per warp: two halve the loads from shared memory, at the cost of registers.
    pub(super) fn row_tiles(&self) -> usize {
        if self.head_dim.vo <= 128 && self.head_dim.qk <= 192 { 2 } else { 1 }
    }

    /// CTAs per SM: the grid and `Tiling::workers` should be a multiple of it. Independent of `bodies`, because one plan serves
    /// both kernels.
    pub fn ctas_per_sm(&self) -> u32 {
        self.ctas_with(self.needs())
    }

    /// The tile budget without hooks.
    pub(super) fn needs(&self) -> Needs {
        Needs { bytes: 0, row_tiles: self.row_tiles() }
    }

    /// CTAs per SM.
    pub(super) fn ctas_with(&self, needs: Needs) -> u32 {
        let any = Self { items: Items::Any, ..*self };
        // plans must also fit kernels without hooks
        let two = [needs, any.needs()].into_iter().all(|needs| any.layout_of_share(2, needs).is_some());
        if two { 2 } else { 1 }
    }

    /// The layout for `ctas` CTAs per SM.
    fn layout_of_share(&self, ctas: usize, needs: Needs) -> Option<Layout> {
        let each = self.device.shared_of_sm / ctas - 1024;
        Layout::new(self, needs.row_tiles, each.min(self.device.shared_of_cta).checked_sub(needs.bytes)?)
    }

    /// Bytes of shared memory per CTA.
    pub fn shared_bytes(&self) -> usize {
        self.layout().map_or(0, |layout| layout.bytes)
    }

    /// The shared memory layout; `None` if it does not fit.
    pub(super) fn layout(&self) -> Option<Layout> {
        self.layout_with(self.needs())
    }

    /// The same for another tile budget, as with hooks.
    pub(super) fn layout_with(&self, needs: Needs) -> Option<Layout> {
        self.layout_of_share(self.ctas_with(needs) as usize, needs)
    }

    /// Whether the kernel supports these arguments. Addresses and strides must be multiples of 16 bytes, those of the output of
    /// 8. Scales may differ between heads, and between pages only in 8-bit caches. Called on every run, so it must not allocate.
    pub fn takes(&self, call: &Call) -> bool {
        let (qo, kv) = (self.qo.size(), self.kv.size());
        let scales = kv == 1 || !(call.k_scale.is_of_pages() || call.v_scale.is_of_pages());
        scales
            && call.q.is_aligned(16, qo)
            && call.k.is_aligned(16, kv)
            && call.v.is_aligned(16, kv)
            && call.o.is_aligned(8, qo)
    }

    /// Reasons why the configuration is unsupported; empty if it is supported.
    pub fn refuses(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        if self.device.arch < 80 {
            reasons
                .push(format!("sm_{} has no asynchronous copies, expected sm_80 or newer", self.device.arch));
        }
        if !matches!(self.qo, Dtype::F16 | Dtype::Bf16) {
            reasons.push(format!("queries are {}, expected f16 or bf16", self.qo));
        }
        if self.kv != self.qo && self.kv.size() > 1 {
            let text = format!("keys and values are {}, expected {} as queries, or 8 bits", self.kv, self.qo);
            reasons.push(text);
        }
        let vector = 16 / self.kv.size();
        for (name, dim) in [("qk", self.head_dim.qk), ("vo", self.head_dim.vo)] {
            if !(16..=256).contains(&dim) || !dim.is_multiple_of(vector) {
                reasons.push(format!("head_dim {name} = {dim}, expected a multiple of {vector} in 16..=256"));
            }
        }
        if reasons.is_empty() && self.layout().is_none() {
            let least = self.device.shared_of_cta;
            reasons
                .push(format!("a CTA has {least} bytes of shared memory, which is too little for two tiles"));
        }
        reasons
    }
}

#[cfg(test)]
mod tests {
    use super::{Config, Device, Items};
    use crate::attention::call::{CacheTensor, Call, KvLayout, PlanArgs, RowTensor, ScaleArgs};
    use tilewright::{Dtype, HeadDim};

    /// Parameters with the minimum alignment.
    fn call(kv: Dtype) -> Call {
        let elements = 16 / kv.size() as u64;
        let of_row = |to: u64| RowTensor { address: 3 * to, row: 5 * to / 2, head: 7 * to / 2 };
        let (page, token, head) = (3 * elements, 5 * elements, 7 * elements);
        let cache = CacheTensor { address: 48, page, token, head };
        let scale = ScaleArgs { address: 4, page: 0, head: 1, factor: 1.0 };
        Call {
            q: of_row(16),
            k: cache,
            v: cache,
            pe: None,
            o: of_row(8),
            lse: 4,
            partial_o: 4,
            partial_lse: 4,
            plan: PlanArgs::default(),
            qo_heads: 1,
            group: 1,
            page_size: 1,
            layout: KvLayout::Paged,
            left: 0,
            right: 0,
            scale: 1.0,
            k_scale: scale,
            v_scale: scale,
            variant: Vec::new(),
        }
    }

    #[test]
    fn refusals_have_all_reasons() {
        let device = Device::of_arch(90);
        let (bf16, items) = (Dtype::Bf16, Items::Any);
        let bf16 = Config { qo: bf16, kv: bf16, head_dim: HeadDim::same(128), items, device };
        assert!(bf16.refuses().is_empty());
        let wrong = Config { qo: Dtype::F32, kv: Dtype::Bf16, head_dim: HeadDim { qk: 33, vo: 512 }, ..bf16 };
        assert_eq!(
            wrong.refuses(),
            [
                "queries are f32, expected f16 or bf16",
                "keys and values are bf16, expected f32 as queries, or 8 bits",
                "head_dim qk = 33, expected a multiple of 8 in 16..=256",
                "head_dim vo = 512, expected a multiple of 8 in 16..=256",
            ]
        );
        let bytes = Config { kv: Dtype::E4m3, head_dim: HeadDim::same(80), ..bf16 };
        assert!(bytes.refuses().is_empty());
        let odd = Config { head_dim: HeadDim { qk: 72, vo: 80 }, ..bytes };
        assert_eq!(odd.refuses(), ["head_dim qk = 72, expected a multiple of 16 in 16..=256"]);
    }

    #[test]
    fn calls_are_taken_if_nothing_speaks_against_them() {
        let (bf16, e4m3) = (Dtype::Bf16, Dtype::E4m3);
        let config = |kv| Config {
            qo: bf16,
            kv,
            head_dim: HeadDim::same(64),
            items: Items::Any,
            device: Device::of_arch(90),
        };
        let misaligned: [fn(&mut Call); 14] = [
            |call| call.q.address += 8,
            |call| call.q.row += 4,
            |call| call.q.head += 4,
            |call| call.k.address += 8,
            |call| call.k.page += 4,
            |call| call.k.token += 4,
            |call| call.k.head += 4,
            |call| call.v.address += 8,
            |call| call.v.page += 4,
            |call| call.v.token += 4,
            |call| call.v.head += 4,
            |call| call.o.address += 4,
            |call| call.o.row += 2,
            |call| call.o.head += 2,
        ];
        for kv in [bf16, e4m3] {
            assert!(config(kv).takes(&call(kv)));
            for change in misaligned {
                let mut call = call(kv);
                change(&mut call);
                assert!(!config(kv).takes(&call), "{call:?}");
            }
        }
        let of_pages: [fn(&mut Call); 2] = [|call| call.k_scale.page = 1, |call| call.v_scale.page = 1];
        for change in of_pages {
            let [mut wide, mut narrow] = [bf16, e4m3].map(call);
            change(&mut wide);
            change(&mut narrow);
            assert!(!config(bf16).takes(&wide) && config(e4m3).takes(&narrow));
        }
    }
}
