//! A custom attention variant: logits times a distance kernel with a learned range per head.
//!
//! `s'[j] = s[j] · e^(-|j - p| / range[h])` for the query at position `p` and the key at `j`.

use tilewright::{
    Attention, Batch, Cpu, HeadDim, Heads, KvCache, Output, Problem, Result, View, ViewMut, Workspace,
    attention::variant::{At, Number, Variant},
};

/// The variant.
#[derive(Debug, Clone)]
pub struct DistanceKernel {
    /// `[num_qo_heads]`, in tokens.
    pub ranges: Vec<f32>,
}

impl Variant for DistanceKernel {
    fn name(&self) -> &str {
        "distance_kernel"
    }

    #[inline(always)]
    fn logits<N: Number>(&self, at: &At<N>, logit: N) -> N {
        let range = at.read("ranges", &self.ranges, at.qo_head());
        logit * (-(at.kv() - at.qo()).abs() / range).exp()
    }
}

fn main() -> Result<()> {
    println!("{:?}", &outputs()?[..4]);
    Ok(())
}

/// Output `[3, 2, 64]`: one request with 2 query heads, 1 KV head, and 3 queries after 5 cached tokens.
pub fn outputs() -> Result<Vec<f32>> {
    let (heads, dim) = (Heads { qo: 2, kv: 1 }, 64);
    let problem = Problem::builder(heads, HeadDim::same(dim)).build()?;
    let attention = Attention::with_variant(problem, DistanceKernel { ranges: vec![2.0, 50.0] }, Cpu::new())?;

    let plan = attention.plan(&Batch::ragged(&[0, 3], &[0, 8]))?;
    let mut workspace = Workspace::for_plan(&plan);
    let q: Vec<f32> = (0..3 * 2 * dim).map(|i| (i as f32 * 0.37).sin()).collect();
    let kv: Vec<f32> = (0..8 * dim).map(|i| (i as f32 * 0.11).cos()).collect();
    let mut o = vec![0.0; q.len()];
    let cache = KvCache { k: View::new(&kv, &[8, 1, dim])?, v: View::new(&kv, &[8, 1, dim])? };
    let out = Output { o: ViewMut::new(&mut o, &[3, 2, dim])?, lse: None, workspace: &mut workspace };
    attention.run(&plan, View::new(&q, &[3, 2, dim])?, cache, out)?;
    Ok(o)
}
