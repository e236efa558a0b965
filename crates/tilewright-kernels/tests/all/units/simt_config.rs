//! Limits of the configurations of `simt`.

use tilewright::{
    Dtype, HeadDim,
    attention::variant::{ExpressionVariant, RotaryEmbedding},
    rope::Rope,
};
use tilewright_kernels::attention::body::simt::{SimtConfig, attention};

#[test]
fn unsupported_configs_report_all_reasons() {
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
