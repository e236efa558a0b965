//! Limits of the configurations of `mma`.

use super::aligned_params::aligned_params;
use tilewright::{Dtype, HeadDim};
use tilewright_kernels::attention::{
    body::{Bodies, DeviceLimits, mma::MmaConfig},
    params::AttentionParams,
};

#[test]
fn unsupported_configs_report_all_reasons() {
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
fn aligned_params_are_accepted() {
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
