//! Configuration of MLA kernels, and its limits.

use super::layout::MlaLayout;
use crate::attention::{
    body::{Bodies, DeviceLimits, accepts_copies},
    params::AttentionParams,
};
use tilewright::{Dtype, HeadDim};

/// Threads per CTA.
pub const THREADS: u32 = 256;

/// Compile-time configuration of an MLA kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MlaConfig {
    /// The dtype of queries, cache and outputs: f16 or bf16. Softmax weights are rounded to it.
    pub dtype: Dtype,
    /// Elements of queries and keys, and of the compressed part, which comes first and is the values: 576 and 512 in DeepSeek
    /// models.
    pub head_dim: HeadDim,
    /// Query heads. With 17 to 32 heads, tiles have at most as many rows as one token; all other counts give the same kernel.
    pub heads: usize,
    /// Item bodies in the kernel.
    pub bodies: Bodies,
    /// The target device.
    pub device: DeviceLimits,
}

impl MlaConfig {
    /// Query rows per tile: the value for `Tiling::q_rows`. Larger items are processed tile by tile.
    pub fn q_rows(&self) -> usize {
        self.layout_of(Bodies::Both).map_or(0, |layout| 16 * layout.multi_group.groups)
    }

    /// Bytes of shared memory per CTA; one CTA per SM.
    pub fn shared_bytes(&self) -> usize {
        self.layout().map_or(0, |layout| layout.cta.bytes)
    }

    /// The shared memory layout; `None` if it does not fit.
    pub(super) fn layout(&self) -> Option<MlaLayout> {
        self.layout_of(self.bodies)
    }

    fn layout_of(&self, bodies: Bodies) -> Option<MlaLayout> {
        let sm = self.device.shared_per_sm.saturating_sub(1024);
        MlaLayout::new((self.head_dim, self.heads), bodies, sm.min(self.device.shared_per_cta))
    }

    /// Whether the kernel supports these arguments. Addresses and strides must be multiples of 16 bytes, those of the output of
    /// 8. Scales may differ between heads, not between pages. Called on every run, so it must not allocate.
    pub fn accepts(&self, params: &AttentionParams) -> bool {
        let size = self.dtype.size();
        accepts_copies(params, [self.dtype; 3])
            && params.pe.is_some_and(|pe| pe.q.is_aligned(16, size) && pe.k.is_aligned(16, size))
    }

    /// Reasons why the configuration is unsupported; empty if it is supported.
    pub fn unsupported(&self) -> Vec<String> {
        let mut reasons: Vec<_> = self.device.unsupported_arch().into_iter().collect();
        let HeadDim { qk, vo } = self.head_dim;
        if !matches!(self.dtype, Dtype::F16 | Dtype::Bf16) {
            reasons.push(format!("queries and the cache are {}, expected f16 or bf16", self.dtype));
        }
        if !(128..=512).contains(&vo) || !vo.is_multiple_of(128) {
            reasons.push(format!("head_dim ckv = {vo}, expected a multiple of 128 in 128..=512"));
        }
        if qk <= vo || !(qk - vo).is_multiple_of(64) {
            let pe = qk.saturating_sub(vo);
            reasons.push(format!("head_dim kpe = {pe}, expected a multiple of 64 above 0"));
        }
        if reasons.is_empty() && self.layout().is_none() {
            reasons.push(self.device.too_little_shared("two KV tiles"));
        }
        reasons
    }
}

#[cfg(test)]
mod tests {
    use super::{Bodies, DeviceLimits, MlaConfig};
    use crate::attention::{
        body::fixtures::aligned_params,
        params::{AttentionParams, CacheTensor, PeTensors, RowTensor},
    };
    use tilewright::{Dtype, HeadDim};

    /// The head dims of DeepSeek models.
    fn config(arch: u32) -> MlaConfig {
        let head_dim = HeadDim { qk: 576, vo: 512 };
        MlaConfig {
            dtype: Dtype::Bf16,
            head_dim,
            heads: 128,
            bodies: Bodies::Both,
            device: DeviceLimits::of_arch(arch),
        }
    }

    #[test]
    fn unsupported_configs_report_all_reasons() {
        let sound = config(90);
        assert!(sound.unsupported().is_empty());
        let wrong = MlaConfig { dtype: Dtype::F32, head_dim: HeadDim { qk: 136, vo: 96 }, ..sound };
        assert_eq!(
            wrong.unsupported(),
            [
                "queries and the cache are f32, expected f16 or bf16",
                "head_dim ckv = 96, expected a multiple of 128 in 128..=512",
                "head_dim kpe = 40, expected a multiple of 64 above 0",
            ]
        );
        let small = DeviceLimits { shared_per_cta: 48 << 10, ..sound.device };
        assert_eq!(
            MlaConfig { device: small, ..sound }.unsupported(),
            ["a CTA has 49152 bytes of shared memory, which is too little for two KV tiles"]
        );
    }

    #[test]
    fn tile_rows_follow_shared_memory_capacity() {
        for (arch, rows) in [(80, 64), (86, 32), (89, 32), (90, 64), (100, 64), (120, 32)] {
            let config = config(arch);
            let split_kv = MlaConfig { bodies: Bodies::SplitKv, ..config };
            assert_eq!((config.q_rows(), split_kv.q_rows()), (rows, rows), "sm_{arch}");
            assert!(config.unsupported().is_empty() && split_kv.unsupported().is_empty(), "sm_{arch}");
            let of_heads = |heads| MlaConfig { heads, ..config }.q_rows();
            assert_eq!([16, 17, 32, 33].map(of_heads), [rows, 32, 32, rows], "sm_{arch}");
            assert!(split_kv.shared_bytes() > 0 && config.shared_bytes() <= config.device.shared_per_cta);
        }
    }

    /// Parameters with the minimum alignment, without values.
    fn params() -> AttentionParams {
        let params = aligned_params(Dtype::Bf16);
        let pe = Some(PeTensors { q: params.q, k: params.k });
        AttentionParams { v: CacheTensor::default(), pe, ..params }
    }

    #[test]
    fn aligned_params_are_accepted() {
        let config = config(90);
        assert!(config.accepts(&params()));
        let wrong: [fn(&mut AttentionParams); 11] = [
            |params| params.q.address += 8,
            |params| params.q.head += 4,
            |params| params.k.page += 4,
            |params| params.k.token += 4,
            |params| params.pe = None,
            |params| params.pe = params.pe.map(|pe| PeTensors { q: RowTensor { row: 4, ..pe.q }, ..pe }),
            |params| {
                params.pe = params.pe.map(|pe| PeTensors { k: CacheTensor { address: 24, ..pe.k }, ..pe });
            },
            |params| params.o.address += 4,
            |params| params.o.row += 2,
            |params| params.k_scale.page = 1,
            |params| params.v_scale.page = 1,
        ];
        for (at, change) in wrong.into_iter().enumerate() {
            let mut params = params();
            change(&mut params);
            assert!(!config.accepts(&params), "change {at}");
        }
    }
}
