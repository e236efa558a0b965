//! Choices of bodies, with the reasons against faster ones.

use tilewright::{
    Dtype, HeadDim, Heads, Problem,
    attention::variant::{ExpressionVariant, Plain, RotaryEmbedding, SoftCap},
    rope::Rope,
};
use tilewright_kernels::attention::{Alignment, ChoiceInput, body::DeviceLimits, choose::choose};

fn heads(dim: usize, qo: Dtype, kv: Dtype) -> Problem {
    let builder = Problem::builder(Heads { qo: 32, kv: 8 }, HeadDim::same(dim));
    builder.dtypes(qo, kv).build().unwrap()
}

fn text(problem: &Problem, variant: &ExpressionVariant, arch: u32) -> String {
    let (device, alignment) = (DeviceLimits::of_arch(arch), Alignment::Vectors);
    choose(&ChoiceInput { problem, variant: Some(variant), device, alignment }).to_string()
}

const WGMMA: &str = "wgmma: above 16 packed rows; mma_split_kv up to 16, side by side";
const MMA: &str = "mma: mma_split_kv up to 16 packed rows, mma_split_q above";
const MMA_PAIRS: &str = "mma: mma_split_kv up to 32 packed rows, mma_split_q above";
const SIMT: &str = "simt: fallback without tensor cores";

#[test]
fn a_choice_prints_the_body_and_the_reasons_against_faster_ones() {
    let plain = ExpressionVariant::of(&Plain).unwrap();
    let rope = RotaryEmbedding::new(&Rope::new(128, 1e4).unwrap()).unwrap();
    let rotated = ExpressionVariant::of(&rope).unwrap();
    let (bf16, f32, e4m3) = (Dtype::Bf16, Dtype::F32, Dtype::E4m3);
    let latent = |heads, kv| {
        let builder = Problem::latent(heads, 512, 64).scale(1.0 / 192_f32.sqrt());
        builder.dtypes(bf16, kv).build().unwrap()
    };
    let against = |reasons: &str| format!("{SIMT}\n  not wgmma: {reasons}\n  not mma: {reasons}");
    let not_e4m3 = "the cache is e4m3, expected bf16 as queries";
    let not_f32 = "outputs are f32, expected f16 or bf16";
    let hooks = "there is a hook of query, expected none; there is a hook of key, expected none";
    let cases = [
        (heads(128, bf16, bf16), &plain, WGMMA.to_owned()),
        (heads(128, bf16, e4m3), &plain, WGMMA.to_owned()),
        (
            heads(256, bf16, e4m3),
            &plain,
            format!(
                "{MMA}\n  not wgmma: head_dim (256, 256) with a cache of e4m3, expected multiples of 16 up to 128"
            ),
        ),
        (
            heads(80, bf16, bf16),
            &plain,
            format!(
                "{MMA_PAIRS}\n  not wgmma: head_dim qk = 80, expected a multiple of 8 up to 256 that fills three quarters \
                 of tiles of 64; head_dim vo = 80, expected a multiple of 8 up to 256 that fills three quarters of \
                 tiles of 64"
            ),
        ),
        (heads(128, f32, f32), &plain, against(not_f32)),
        (latent(128, bf16), &plain, "mla_wgmma".to_owned()),
        (
            latent(129, bf16),
            &plain,
            "mla\n  not mla_wgmma: there are 129 query heads, the most is 128".to_owned(),
        ),
        (latent(128, e4m3), &plain, "mla_wgmma".to_owned()),
        (
            latent(129, e4m3),
            &plain,
            format!(
                "{SIMT}\n  not mla_wgmma: there are 129 query heads, the most is 128\n  not mla: {not_e4m3}"
            ),
        ),
        (heads(128, bf16, bf16), &rotated, against(hooks)),
    ];
    for (problem, variant, expected) in cases {
        assert_eq!(text(&problem, variant, 90), expected, "{problem}");
    }
}

#[test]
fn a_choice_depends_on_device_alignment_and_logits_hooks() {
    let (problem, device) = (heads(128, Dtype::Bf16, Dtype::Bf16), DeviceLimits::of_arch(80));
    let variant = ExpressionVariant::of(&SoftCap::new(50.0).unwrap()).unwrap();
    assert_eq!(text(&problem, &variant, 90), WGMMA);
    let not_wgmma = "\n  not wgmma: sm_80 has no wgmma, expected sm_90";
    assert_eq!(text(&problem, &variant, 80), format!("{MMA}{not_wgmma}"));
    let latent = Problem::latent(16, 512, 64).scale(0.1).dtypes(Dtype::F16, Dtype::F16).build().unwrap();
    let plain = ExpressionVariant::of(&Plain).unwrap();
    let not_hopper = "mla\n  not mla_wgmma: sm_100 has no wgmma, expected sm_90";
    assert_eq!(text(&latent, &plain, 100), not_hopper);
    let alignment = Alignment::Elements;
    let choice = choose(&ChoiceInput { problem: &problem, variant: None, device, alignment });
    let unaligned = "tensors may be aligned to elements only, expected 16 bytes";
    assert_eq!(choice.to_string(), format!("{SIMT}{not_wgmma}; {unaligned}\n  not mma: {unaligned}"));
}
