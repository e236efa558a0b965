//! Limits and alignment of the configurations of the bodies `mma`, `mla` and `simt`.

use tilewright::{
    Dtype, HeadDim,
    attention::variant::{ExpressionVariant, RotaryEmbedding},
    rope::Rope,
};
use tilewright_kernels::attention::{
    body::{
        Bodies, DeviceLimits,
        mla::MlaConfig,
        mma::MmaConfig,
        simt::{SimtConfig, attention},
    },
    params::{
        AttentionParams, CacheTensor, KvLayout, OwnParams, PeTensors, PlanArrays, RowTensor, ScaleTensor,
    },
};

/// Parameters with the minimum alignment for queries of 16 bits.
pub(crate) fn aligned_params(kv: Dtype) -> AttentionParams {
    let elements = 16 / kv.size() as u64;
    let of_row = |to: u64| RowTensor { address: 3 * to, row: 5 * to / 2, head: 7 * to / 2 };
    let (page, token, head) = (3 * elements, 5 * elements, 7 * elements);
    let cache = CacheTensor { address: 48, page, token, head };
    let scale = ScaleTensor { address: 4, page: 0, head: 1, value: 1.0 };
    AttentionParams {
        q: of_row(16),
        k: cache,
        v: cache,
        pe: None,
        o: of_row(8),
        lse: 4,
        partial_o: 4,
        partial_stats: 4,
        plan: PlanArrays::default(),
        qo_heads: 1,
        group: 1,
        page_size: 1,
        layout: KvLayout::Paged,
        left: 0,
        right: 0,
        scale: 1.0,
        k_scale: scale,
        v_scale: scale,
        own: OwnParams::default(),
        variant: Vec::new(),
    }
}

#[test]
fn unsupported_mma_configs_report_all_reasons() {
    let device = DeviceLimits::of_arch(90);
    let (bf16, bodies) = (Dtype::Bf16, Bodies::Both);
    let bf16 =
        MmaConfig { q: bf16, o: bf16, out: bf16, kv: bf16, head_dim: HeadDim::same(128), bodies, device };
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
fn aligned_params_are_accepted_by_mma() {
    let (bf16, e4m3) = (Dtype::Bf16, Dtype::E4m3);
    let config = |kv| MmaConfig {
        q: bf16,
        o: bf16,
        out: bf16,
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

/// The head dims of DeepSeek models.
fn mla_config(arch: u32) -> MlaConfig {
    let head_dim = HeadDim { qk: 576, vo: 512 };
    MlaConfig {
        dtype: Dtype::Bf16,
        out: Dtype::Bf16,
        head_dim,
        heads: 128,
        bodies: Bodies::Both,
        device: DeviceLimits::of_arch(arch),
    }
}

#[test]
fn unsupported_mla_configs_report_all_reasons() {
    let sound = mla_config(90);
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
fn mla_tile_rows_follow_shared_memory_capacity() {
    for (arch, rows) in [(80, 64), (86, 32), (89, 32), (90, 64), (100, 64), (120, 32)] {
        let config = mla_config(arch);
        let split_kv = MlaConfig { bodies: Bodies::SplitKv, ..config };
        assert_eq!((config.q_rows(), split_kv.q_rows()), (rows, rows), "sm_{arch}");
        assert!(config.unsupported().is_empty() && split_kv.unsupported().is_empty(), "sm_{arch}");
        let of_heads = |heads| MlaConfig { heads, ..config }.q_rows();
        assert_eq!([16, 17, 32, 33].map(of_heads), [rows, 32, 32, rows], "sm_{arch}");
        assert!(split_kv.shared_bytes() > 0 && config.shared_bytes() <= config.device.shared_per_cta);
    }
}

/// Parameters with the minimum alignment, without values.
fn latent_params() -> AttentionParams {
    let params = aligned_params(Dtype::Bf16);
    let pe = Some(PeTensors { q: params.q, k: params.k });
    AttentionParams { v: CacheTensor::default(), pe, ..params }
}

#[test]
fn aligned_params_are_accepted_by_mla() {
    let config = mla_config(90);
    assert!(config.accepts(&latent_params()));
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
        let mut params = latent_params();
        change(&mut params);
        assert!(!config.accepts(&params), "change {at}");
    }
}

#[test]
fn unsupported_simt_configs_report_all_reasons() {
    let rope = Rope::new(40, 1e4).and_then(|rope| RotaryEmbedding::new(&rope)).expect("it is sound");
    let rope = ExpressionVariant::of(&rope).expect("it can be recorded");
    let refused = |dtype_o, qk, vo, latent| {
        let head_dim = HeadDim { qk, vo };
        let config = SimtConfig { dtype_q: dtype_o, dtype_o, dtype_kv: Dtype::I8, head_dim, mla: latent };
        attention("attend", config, &rope).expect_err("refused").to_string()
    };
    assert_eq!(
        refused(Dtype::E5m2, 1025, 0, false),
        "kernel attend: o dtype = e5m2, expected f32, f16, bf16 or e4m3; head_dim.qk = 1025, expected 1..=1024; \
         head_dim.vo = 0, expected 1..=1024; head_dim.qk = 1025, expected an even one: a hook needs pairs"
    );
    assert_eq!(
        refused(Dtype::F32, 64, 64, true),
        "kernel attend: head_dim = 64/64 latent, expected more for keys than for values"
    );
}
