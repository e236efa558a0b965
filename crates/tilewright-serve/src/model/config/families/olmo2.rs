//! OLMo 2: norms after each block instead of before, and an RMSNorm over the whole q and k projections.

use super::{Family, LLAMA};
use crate::model::config::{NormPlacement, QkNorm};

pub(super) const FAMILY: Family = Family {
    model_type: "olmo2",
    class: "Olmo2ForCausalLM",
    eps: 1e-5,
    reads: &["attention_bias"],
    terms: |_, config| {
        config.norm_placement = NormPlacement::After;
        config.qk_norm = Some(QkNorm::Projection);
        Ok(())
    },
    ..LLAMA
};
