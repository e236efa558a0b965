//! Test cases: a batch of requests, the memory layout of its keys, and the split of its work; noise, and conversion
//! between f64 and the bytes of a dtype.

use half::{bf16, f16};
use std::ops::Add as _;
use tilewright::{
    Dtype, E4m3, E5m2, HeadDim,
    attention::{
        BitOrder, segment_packbits,
        variant::{ExpressionVariant, Hook},
    },
};
use tilewright_kernels::attention::{
    AttentionParams, Body, KernelConfig, KvLayout, UNLIMITED, Wait,
    body::{
        Bodies, DeviceLimits, MAX_PAIRED_ROWS, MAX_SPLIT_KV_ROWS, mla,
        mla_wgmma::MlaWgmmaConfig,
        mma::{self, MmaConfig},
        simt::SimtConfig,
        wgmma::{self, WgmmaConfig},
    },
    operator::AttentionKernel,
};
use tilewright_ptx::{Invalid, Kernel};

/// Granularity of the KV scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scales {
    One,
    Tensor,
    Head,
    Page,
    /// Keys per head, values per page and head.
    Mixed,
}

/// A batch and a problem.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) qo: Dtype,
    /// Queries are e4m3.
    pub(crate) fp8: bool,
    /// Outputs are e4m3.
    pub(crate) fp8_outputs: bool,
    pub(crate) kv: Dtype,
    pub(crate) scales: Scales,
    pub(crate) dim: HeadDim,
    /// Query and KV heads.
    pub(crate) heads: (usize, usize),
    /// Query rows and keys of each request.
    pub(crate) lengths: Vec<(usize, usize)>,
    /// Number of leading keys that all requests share, in a segment of their own.
    pub(crate) prefix: usize,
    pub(crate) layout: KvLayout,
    pub(crate) page_size: usize,
    /// HND layout: heads outside of tokens.
    pub(crate) hnd: bool,
    /// Left and right limits of the mask.
    pub(crate) mask: (u32, u32),
    /// Mask bits hide some of the last `n` keys of each request.
    pub(crate) bits: Option<usize>,
    /// Split length: items end at multiples of it.
    pub(crate) piece: usize,
    pub(crate) workers: usize,
    /// Two CTAs execute each run of `wgmma` together; `workers` are pairs.
    pub(crate) pairs: bool,
    /// CTAs of a second launch of `wgmma`, which draws runs only.
    pub(crate) second: usize,
    /// Ratio of the last to the first key magnitude of a segment, linear in between.
    pub(crate) growth: f64,
    /// Factor of the queries; the scale of the logits is divided by it.
    pub(crate) query_factor: f64,
    /// Values of the last 128 keys of a segment, and of all others, instead of noise.
    pub(crate) constant_values: Option<(f64, f64)>,
    /// Non-finite keys: request, key, value. NaN of positive sign is in the key, too.
    pub(crate) spoiled: Vec<(usize, usize, f64)>,
    pub(crate) arch: u32,
    /// The body that computes all items. With those for latent heads, values are the first elements of keys.
    pub(crate) body: Body,
    /// No item arrives at a merge: a launch of its own performs all merges.
    pub(crate) has_merge_launch: bool,
    pub(crate) seeds: u64,
}

pub(crate) const FULL: (u32, u32) = (UNLIMITED, UNLIMITED);
pub(crate) const CAUSAL: (u32, u32) = (UNLIMITED, 0);
/// Non-finite keys, in tiles that some rows see and others do not.
pub(crate) const SPOILED: [(usize, usize, f64); 7] = [
    (0, 3, f64::NAN),
    (0, 40, f64::INFINITY),
    (1, 25, f64::NAN),
    (1, 41, f64::NEG_INFINITY),
    (1, 60, f64::INFINITY),
    (1, 64, f64::NEG_INFINITY),
    (2, 10, f64::NAN),
];
/// Longer than any request.
pub(crate) const WHOLE: usize = 1 << 20;

impl Case {
    pub(crate) fn new(dim: usize, heads: (usize, usize), lengths: &[(usize, usize)]) -> Self {
        Self {
            qo: Dtype::Bf16,
            fp8: false,
            fp8_outputs: false,
            kv: Dtype::Bf16,
            scales: Scales::One,
            dim: HeadDim::same(dim),
            heads,
            lengths: lengths.to_vec(),
            prefix: 0,
            layout: KvLayout::Paged,
            page_size: 16,
            hnd: false,
            mask: CAUSAL,
            bits: None,
            piece: WHOLE,
            workers: 2,
            pairs: false,
            second: 0,
            growth: 1.0,
            query_factor: 1.0,
            constant_values: None,
            spoiled: Vec::new(),
            arch: 90,
            body: Body::Mma,
            has_merge_launch: false,
            seeds: 1,
        }
    }

    pub(crate) fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Kernels for this case: more if all items have few rows.
    pub(crate) fn kernels(&self, variant: &ExpressionVariant) -> Vec<(Bodies, Result<Kernel, Invalid>)> {
        // all requests share the rows of a level
        let rows =
            self.lengths.iter().map(|of| of.0).reduce(if self.prefix > 0 { usize::add } else { usize::max });
        let has_rows = |most| rows.unwrap_or(0) * self.group() <= most;
        let mut bodies = vec![Bodies::Both];
        if matches!(self.body, Body::Mma | Body::Mla) && has_rows(MAX_SPLIT_KV_ROWS) {
            bodies.push(Bodies::SplitKv);
        }
        let fits_pairs = || mma::fits_pairs(&self.config(Bodies::SplitKvPairs), variant);
        if self.body == Body::Mma && has_rows(MAX_PAIRED_ROWS) && fits_pairs() {
            bodies.push(Bodies::SplitKvPairs);
        }
        if self.body == Body::Mma && has_rows(MAX_SPLIT_KV_ROWS) {
            let of_boxes = Bodies::of_boxes(self.layout, self.page_size as u32);
            bodies.extend(of_boxes.filter(|bodies| self.config(*bodies).unsupported().is_empty()));
        }
        let record = |bodies| {
            let kernel = self.kernel(bodies, variant);
            (bodies, kernel.record(&kernel.name(variant), variant))
        };
        bodies.into_iter().map(record).collect()
    }

    /// The kernel for items, or for runs.
    pub(crate) fn kernel(&self, bodies: Bodies, variant: &ExpressionVariant) -> AttentionKernel {
        AttentionKernel::Items(match self.body {
            Body::Wgmma => return AttentionKernel::Runs(self.wgmma_config(variant)),
            Body::Mma => KernelConfig::Mma(self.config(bodies)),
            Body::MlaWgmma => KernelConfig::MlaWgmma(self.mla_wgmma_config()),
            Body::Mla => KernelConfig::Mla(self.latent_config(bodies)),
            Body::Simt => KernelConfig::Simt(self.simt_config()),
        })
    }

    /// The point at which a kernel with workers waits for the previous launch, which depends on the seed.
    pub(crate) fn wait(&self, bodies: Bodies, seed: u64) -> Option<Wait> {
        let can_wait = self.body == Body::Mma && self.config(bodies).can_follow_runs();
        can_wait.then_some([Wait::AtStart, Wait::AtEnd][(seed % 2) as usize])
    }

    pub(crate) fn config(&self, bodies: Bodies) -> MmaConfig {
        let device = DeviceLimits::of_arch(self.arch);
        MmaConfig {
            q: self.q(),
            o: self.qo,
            out: self.out(),
            kv: self.kv,
            head_dim: self.dim,
            bodies,
            device,
        }
    }

    pub(crate) fn wgmma_config(&self, variant: &ExpressionVariant) -> WgmmaConfig {
        let any_mask = self.bits.is_some() || self.layout == KvLayout::Blocks || variant.is_live(Hook::Mask);
        WgmmaConfig {
            q: self.q(),
            o: self.qo,
            out: self.out(),
            kv: self.kv,
            head_dim: self.dim,
            any_mask,
            pairs: self.pairs,
        }
    }

    pub(crate) fn latent_config(&self, bodies: Bodies) -> mla::MlaConfig {
        let device = DeviceLimits::of_arch(self.arch);
        mla::MlaConfig {
            dtype: self.qo,
            out: self.out(),
            head_dim: self.dim,
            heads: self.heads.0,
            bodies,
            device,
        }
    }

    pub(crate) fn mla_wgmma_config(&self) -> MlaWgmmaConfig {
        let (kv, out, heads) = (self.kv, self.out(), self.heads.0);
        MlaWgmmaConfig { dtype: self.qo, kv, out, head_dim: self.dim, heads }
    }

    fn simt_config(&self) -> SimtConfig {
        let [dtype_q, dtype_o, dtype_kv] = [self.q(), self.out(), self.kv];
        SimtConfig { dtype_q, dtype_o, dtype_kv, head_dim: self.dim, mla: false }
    }

    /// Rows per tile of the kernel.
    pub(crate) fn q_rows(&self, variant: &ExpressionVariant) -> usize {
        match self.kernel(Bodies::Both, variant) {
            AttentionKernel::Items(config) => config.q_rows(),
            _ if self.pairs => 2 * (wgmma::Q_ROWS / self.group()) * self.group(),
            _ => wgmma::Q_ROWS,
        }
    }

    /// Whether the kernel supports a call.
    pub(crate) fn takes(&self, variant: &ExpressionVariant, params: &AttentionParams) -> bool {
        match self.kernel(Bodies::Both, variant) {
            AttentionKernel::Items(config) => config.accepts(params),
            AttentionKernel::Runs(config) => config.accepts(params),
            AttentionKernel::LevelMerges(_) | AttentionKernel::LargeMerges(_) => false,
        }
    }

    /// Whether values are the first elements of keys.
    pub(crate) fn is_latent(&self) -> bool {
        matches!(self.body, Body::Mla | Body::MlaWgmma)
    }

    /// Whether weights are rounded to 8 bits.
    pub(crate) fn has_fp8_products(&self) -> bool {
        self.fp8 && self.body == Body::Wgmma
    }

    /// The dtype of weights.
    pub(crate) fn weights(&self) -> Dtype {
        match self.body {
            _ if self.has_fp8_products() => Dtype::E4m3,
            Body::Simt => Dtype::F32,
            _ => self.qo,
        }
    }

    /// The value of a key of a segment of `len` keys, if it is not noise.
    pub(crate) fn constant_value(&self, key: usize, len: usize) -> Option<f64> {
        self.constant_values.map(|(last, others)| if key + 128 < len { others } else { last })
    }

    /// The dtype of queries.
    pub(crate) fn q(&self) -> Dtype {
        if self.fp8 { Dtype::E4m3 } else { self.qo }
    }

    /// The dtype of outputs.
    pub(crate) fn out(&self) -> Dtype {
        if self.fp8_outputs { Dtype::E4m3 } else { self.qo }
    }

    /// Elements between heads of queries or outputs: 16 bytes at least.
    pub(crate) fn padding(&self) -> usize {
        // so that odd numbers of eight outputs of one byte are aligned
        let odd = if self.fp8_outputs { self.dim.vo % 16 } else { 0 };
        16 / self.q().size().min(self.out().size()) + odd
    }

    pub(crate) fn group(&self) -> usize {
        self.heads.0 / self.heads.1
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.lengths.iter().map(|of| of.0).sum()
    }

    pub(crate) fn first_row(&self, request: usize) -> usize {
        self.lengths[..request].iter().map(|of| of.0).sum()
    }

    /// Scale of keys (0) or values (1) of a page and KV head.
    pub(crate) fn factor(&self, of: usize, page: usize, head: usize) -> f32 {
        // differs by two orders of magnitude between pages, and by more for some
        let one = |at: usize| [0.013, 0.6, 0.1, 0.04, 0.0007][(at + of) % 5];
        match (self.scales, of) {
            (Scales::One, _) => 1.0,
            (Scales::Tensor, _) => one(1),
            (Scales::Head, _) | (Scales::Mixed, 0) => one(head),
            (Scales::Page, _) => one(page),
            (Scales::Mixed, _) => one(page * 3 + head),
        }
    }

    /// Whether the mask bits of a request show a key to its `row`th row.
    pub(crate) fn bit(&self, request: usize, row: usize, key: usize) -> bool {
        let Some(columns) = self.bits else { return true };
        let free = self.lengths[request].1.saturating_sub(columns);
        key < free || !(row * 7 + key * 5 + request).is_multiple_of(3)
    }

    /// The mask bits, and the first byte of each request.
    pub(crate) fn mask_bits(&self) -> (Vec<u8>, Vec<i64>) {
        let (mut flags, mut bounds) = (Vec::new(), vec![0]);
        for (request, &(rows, keys)) in self.lengths.iter().enumerate() {
            let free = keys.saturating_sub(self.bits.unwrap_or(0));
            let of_row = |row| (free..keys).map(move |key| self.bit(request, row, key));
            flags.extend((0..rows).flat_map(of_row));
            bounds.push(flags.len() as i64);
        }
        segment_packbits(&flags, &bounds, BitOrder::Little).expect("bounds ascend")
    }

    /// Whether the key at a position is visible to the `row`th row of a request.
    pub(crate) fn sees(&self, request: usize, row: usize, (key, at): (usize, i64)) -> bool {
        let (rows, keys) = self.lengths[request];
        let position = keys as i64 - rows as i64 + row as i64;
        let (left, right) = (i64::from(self.mask.0), i64::from(self.mask.1));
        at >= position - left && at <= position + right && self.bit(request, row, key)
    }
}

/// Deterministic noise in -1..1.
pub(crate) fn noise(seed: u64, at: usize) -> f64 {
    let mut state = (at as u64).wrapping_add(seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((state ^ (state >> 31)) >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
}

/// Rounds to a dtype.
pub(crate) fn bytes(dtype: Dtype, x: f64) -> Vec<u8> {
    match dtype {
        Dtype::F16 => f16::from_f64(x).to_le_bytes().to_vec(),
        Dtype::Bf16 => bf16::from_f64(x).to_le_bytes().to_vec(),
        Dtype::E4m3 => vec![E4m3::from_f32(x as f32).to_bits()],
        Dtype::E5m2 if x.is_infinite() => vec![if x > 0.0 { 0x7c } else { 0xfc }],
        Dtype::E5m2 => vec![E5m2::from_f32(x as f32).to_bits()],
        Dtype::I8 => vec![(x * 100.0).round().clamp(-128.0, 127.0) as i8 as u8],
        Dtype::F32 => (x as f32).to_le_bytes().to_vec(),
    }
}

/// Decodes one element.
pub(crate) fn number(dtype: Dtype, bytes: &[u8]) -> f64 {
    let pair = || [bytes[0], bytes[1]];
    match dtype {
        Dtype::F16 => f16::from_le_bytes(pair()).to_f64(),
        Dtype::Bf16 => bf16::from_le_bytes(pair()).to_f64(),
        Dtype::E4m3 => f64::from(f32::from(E4m3::from_bits(bytes[0]))),
        Dtype::E5m2 => f64::from(f32::from(E5m2::from_bits(bytes[0]))),
        Dtype::I8 => f64::from(bytes[0] as i8),
        Dtype::F32 => f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
    }
}
