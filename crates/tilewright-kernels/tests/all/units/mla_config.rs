//! Limits of the configurations of `mla`.

use super::aligned_params::aligned_params;
use tilewright::{Dtype, HeadDim};
use tilewright_kernels::attention::{
    body::{Bodies, DeviceLimits, mla::MlaConfig},
    params::{AttentionParams, CacheTensor, PeTensors, RowTensor},
};

/// The head dims of DeepSeek models.
fn config(arch: u32) -> MlaConfig {
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
