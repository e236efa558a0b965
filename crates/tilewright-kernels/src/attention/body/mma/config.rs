//! Kernel configuration: dtypes, head dims, device, and the tile sizes and shared memory that follow from them.

use super::layout::MmaLayout;
use crate::attention::{
    body::{Bodies, DeviceLimits, accepts_copies},
    params::AttentionParams,
};
use tilewright::{Dtype, HeadDim};

/// Threads per CTA.
pub const THREADS: u32 = 128;
/// Keys per KV tile.
pub const KV_TOKENS: usize = 64;

/// Compile-time configuration of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MmaConfig {
    /// The dtype of queries: that of outputs, or e4m3 over a cache of e4m3.
    pub q: Dtype,
    /// The dtype of outputs: f16 or bf16. Softmax weights are rounded to it.
    pub o: Dtype,
    /// The dtype of keys and values: that of outputs, or an 8-bit one.
    pub kv: Dtype,
    /// Elements per head.
    pub head_dim: HeadDim,
    /// Item bodies in the kernel.
    pub bodies: Bodies,
    /// The target device.
    pub device: DeviceLimits,
}

/// Row tiles per warp, and shared memory reserved outside of the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TileBudget {
    /// Reserved bytes of shared memory.
    pub(crate) bytes: usize,
    /// [`MmaConfig::row_tiles`] or fewer.
    pub(crate) row_tiles: usize,
}

impl MmaConfig {
    /// Query rows per tile: the value for `Tiling::q_rows`. Larger items are processed tile by tile.
    pub fn q_rows(&self) -> usize {
        64 * self.row_tiles()
    }

    /// Row tiles of 16 rows per warp: two halve the loads from shared memory, at the cost of registers.
    pub(crate) fn row_tiles(&self) -> usize {
        if self.head_dim.vo <= 128 && self.head_dim.qk <= 192 { 2 } else { 1 }
    }

    /// CTAs per SM: the grid and `Tiling::workers` should be a multiple of it. Independent of `bodies`, because one plan serves
    /// both kernels.
    pub fn ctas_per_sm(&self) -> u32 {
        self.ctas_with_budget(self.tile_budget())
    }

    /// The tile budget without hooks.
    pub(crate) fn tile_budget(&self) -> TileBudget {
        TileBudget { bytes: 0, row_tiles: self.row_tiles() }
    }

    /// CTAs per SM.
    pub(crate) fn ctas_with_budget(&self, tile_budget: TileBudget) -> u32 {
        let both = Self { bodies: Bodies::Both, ..*self };
        // plans must also fit kernels without hooks
        let fits_two = [tile_budget, both.tile_budget()]
            .into_iter()
            .all(|tile_budget| both.layout_for_ctas(2, tile_budget).is_some());
        if fits_two { 2 } else { 1 }
    }

    /// The layout for `ctas` CTAs per SM.
    fn layout_for_ctas(&self, ctas: usize, tile_budget: TileBudget) -> Option<MmaLayout> {
        let each = self.device.shared_per_sm / ctas - 1024;
        MmaLayout::new(
            self,
            tile_budget.row_tiles,
            each.min(self.device.shared_per_cta).checked_sub(tile_budget.bytes)?,
        )
    }

    /// Bytes of shared memory per CTA.
    pub fn shared_bytes(&self) -> usize {
        self.layout().map_or(0, |layout| layout.cta.bytes)
    }

    /// The shared memory layout; `None` if it does not fit.
    pub(crate) fn layout(&self) -> Option<MmaLayout> {
        self.layout_with_budget(self.tile_budget())
    }

    /// The same for another tile budget, as with hooks.
    pub(crate) fn layout_with_budget(&self, tile_budget: TileBudget) -> Option<MmaLayout> {
        self.layout_for_ctas(self.ctas_with_budget(tile_budget) as usize, tile_budget)
    }

    /// Whether the kernel supports these arguments. Addresses and strides must be multiples of 16 bytes, those of the output of
    /// 8. Scales may differ between heads, and between pages only in 8-bit caches. Called on every run, so it must not allocate.
    pub fn accepts(&self, params: &AttentionParams) -> bool {
        accepts_copies(params, [self.q, self.o, self.kv]) && params.v.is_aligned(16, self.kv.size())
    }

    /// Reasons why the configuration is unsupported; empty if it is supported.
    pub fn unsupported(&self) -> Vec<String> {
        let mut reasons: Vec<_> = self.device.unsupported_arch().into_iter().collect();
        if !matches!(self.o, Dtype::F16 | Dtype::Bf16) {
            reasons.push(format!("outputs are {}, expected f16 or bf16", self.o));
        }
        if self.q != self.o && (self.q, self.kv) != (Dtype::E4m3, Dtype::E4m3) {
            reasons
                .push(format!("queries are {}, expected {} as outputs, or e4m3 as a cache", self.q, self.o));
        }
        if self.kv != self.o && self.kv.size() > 1 {
            let text = format!("keys and values are {}, expected {} as outputs, or 8 bits", self.kv, self.o);
            reasons.push(text);
        }
        let vector = 16 / self.kv.size();
        for (name, dim) in [("qk", self.head_dim.qk), ("vo", self.head_dim.vo)] {
            if !(16..=256).contains(&dim) || !dim.is_multiple_of(vector) {
                reasons.push(format!("head_dim {name} = {dim}, expected a multiple of {vector} in 16..=256"));
            }
        }
        if reasons.is_empty() && self.layout().is_none() {
            reasons.push(self.device.too_little_shared("two tiles"));
        }
        reasons
    }
}

#[cfg(test)]
mod tests {
    use super::{Bodies, DeviceLimits, MmaConfig};
    use crate::attention::{body::fixtures::aligned_params, params::AttentionParams};
    use tilewright::{Dtype, HeadDim};

    #[test]
    fn unsupported_configs_report_all_reasons() {
        let device = DeviceLimits::of_arch(90);
        let (bf16, bodies) = (Dtype::Bf16, Bodies::Both);
        let bf16 = MmaConfig { q: bf16, o: bf16, kv: bf16, head_dim: HeadDim::same(128), bodies, device };
        assert!(bf16.unsupported().is_empty());
        let wrong = MmaConfig {
            q: Dtype::E4m3,
            o: Dtype::F32,
            kv: Dtype::Bf16,
            head_dim: HeadDim { qk: 33, vo: 512 },
            ..bf16
        };
        assert_eq!(
            wrong.unsupported(),
            [
                "outputs are f32, expected f16 or bf16",
                "queries are e4m3, expected f32 as outputs, or e4m3 as a cache",
                "keys and values are bf16, expected f32 as outputs, or 8 bits",
                "head_dim qk = 33, expected a multiple of 8 in 16..=256",
                "head_dim vo = 512, expected a multiple of 8 in 16..=256",
            ]
        );
        let bytes = MmaConfig { kv: Dtype::E4m3, head_dim: HeadDim::same(80), ..bf16 };
        assert!(bytes.unsupported().is_empty());
        let odd = MmaConfig { head_dim: HeadDim { qk: 72, vo: 80 }, ..bytes };
        assert_eq!(odd.unsupported(), ["head_dim qk = 72, expected a multiple of 16 in 16..=256"]);
    }

    #[test]
    fn aligned_params_are_accepted() {
        let (bf16, e4m3) = (Dtype::Bf16, Dtype::E4m3);
        let config = |kv| MmaConfig {
            q: bf16,
            o: bf16,
            kv,
            head_dim: HeadDim::same(64),
            bodies: Bodies::Both,
            device: DeviceLimits::of_arch(90),
        };
        let misaligned: [fn(&mut AttentionParams); 14] = [
            |params| params.q.address += 8,
            |params| params.q.row += 4,
            |params| params.q.head += 4,
            |params| params.k.address += 8,
            |params| params.k.page += 4,
            |params| params.k.token += 4,
            |params| params.k.head += 4,
            |params| params.v.address += 8,
            |params| params.v.page += 4,
            |params| params.v.token += 4,
            |params| params.v.head += 4,
            |params| params.o.address += 4,
            |params| params.o.row += 2,
            |params| params.o.head += 2,
        ];
        for kv in [bf16, e4m3] {
            assert!(config(kv).accepts(&aligned_params(kv)));
            for change in misaligned {
                let mut params = aligned_params(kv);
                change(&mut params);
                assert!(!config(kv).accepts(&params), "{params:?}");
            }
        }
        let of_pages: [fn(&mut AttentionParams); 2] =
            [|params| params.k_scale.page = 1, |params| params.v_scale.page = 1];
        for change in of_pages {
            let [mut wide, mut narrow] = [bf16, e4m3].map(aligned_params);
            change(&mut wide);
            change(&mut narrow);
            assert!(!config(bf16).accepts(&wide) && config(e4m3).accepts(&narrow));
        }
    }
}
