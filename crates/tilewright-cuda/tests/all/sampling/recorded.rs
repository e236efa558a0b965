//! Device memory as parameters and outputs of a draw, which is recorded: replays read the present parameters and wait for nothing.

use tilewright::{
    Backend, Dtype, Operator,
    sampling::{
        SamplingParams, Scores, TensorChain, TensorParam, TensorParams, TensorSampling, TensorTopKMask,
        TieBreak, TokenSampling, TopK, TopKSelection,
    },
    tensor::{DeviceMemory, IndicesMut},
};
use tilewright_cuda::{Gpu, machine::Machine};

const TOKENS: usize = 3;
const VOCAB: usize = 500;

/// The values of one step in device memory.
struct Step {
    top_k: [i32; TOKENS],
    top_p: [f32; TOKENS],
    rows: [i32; TOKENS],
    offset: u64,
}

impl Step {
    /// The parameters on the host: values out of range have their documented meaning.
    fn params(&self, token: usize) -> SamplingParams {
        SamplingParams {
            top_k: u32::try_from(self.top_k[token]).ok().filter(|k| *k > 0),
            top_p: self.top_p[token].min(1.0),
            seed: 3,
            offset: self.offset + 4 * token as u64,
            ..SamplingParams::default()
        }
    }
}

/// The device memory of a draw.
struct Tensors {
    probs: DeviceMemory,
    top_k: DeviceMemory,
    top_p: DeviceMemory,
    rows: DeviceMemory,
    offset: DeviceMemory,
    tokens: DeviceMemory,
    valid: DeviceMemory,
}

impl Tensors {
    fn new<M: Machine>(gpu: &Gpu<M>, probs: &[f32]) -> tilewright::Result<Self> {
        Ok(Self {
            probs: gpu.upload(bytemuck::cast_slice(probs))?,
            top_k: gpu.allocate(4 * TOKENS)?,
            top_p: gpu.allocate(4 * TOKENS)?,
            rows: gpu.allocate(4 * TOKENS)?,
            offset: gpu.allocate(8)?,
            tokens: gpu.allocate(4 * TOKENS)?,
            valid: gpu.allocate(TOKENS)?,
        })
    }

    fn write<M: Machine>(&self, gpu: &Gpu<M>, step: &Step) -> tilewright::Result<()> {
        let write = |to: &DeviceMemory, bytes: &[u8]| gpu.machine().write(to.address(), bytes);
        write(&self.top_k, bytemuck::cast_slice(&step.top_k))?;
        write(&self.top_p, bytemuck::cast_slice(&step.top_p))?;
        write(&self.rows, bytemuck::cast_slice(&step.rows))?;
        write(&self.offset, bytemuck::bytes_of(&step.offset))
    }

    fn draw<M: Machine>(&mut self, gpu: &Gpu<M>) -> tilewright::Result<()> {
        let params = TensorParams {
            top_k: TensorParam::Each(self.top_k.indices(0, TOKENS)?),
            top_p: TensorParam::Each(self.top_p.view(Dtype::F32, 0, &[TOKENS])?),
            seed: TensorParam::All(3),
            offset: TensorParam::Each(self.offset.integers(0, 1)?),
            offset_step: 4,
            ..TensorParams::default()
        };
        TensorSampling {
            scores: Scores::Probs(self.probs.view(Dtype::F32, 0, &[2, VOCAB])?),
            rows: Some(self.rows.indices(0, TOKENS)?),
            params,
            tokens: self.tokens.indices_mut(0, TOKENS)?,
            valid: Some(self.valid.view_mut(Dtype::I8, 0, &[TOKENS])?),
        }
        .run(gpu)
    }

    fn found<M: Machine>(&self, gpu: &Gpu<M>) -> tilewright::Result<([i32; TOKENS], [i8; TOKENS])> {
        let (mut tokens, mut valid) = ([0; TOKENS], [0; TOKENS]);
        gpu.machine().read(self.tokens.address(), bytemuck::cast_slice_mut(&mut tokens))?;
        gpu.machine().read(self.valid.address(), bytemuck::cast_slice_mut(&mut valid))?;
        Ok((tokens, valid))
    }
}

fn replays_read_the_present_parameters<M: Machine>(gpu: &Gpu<M>) -> tilewright::Result<()> {
    let probs: Vec<f32> = (0..2 * VOCAB).map(|i| 1.0 + (i * 7919 % 1009) as f32).collect();
    let mut tensors = Tensors::new(gpu, &probs)?;
    let step = |top_k, top_p: f32, rows, offset| Step { top_k, top_p: [top_p, 0.5, 1.0], rows, offset };
    let steps = [
        step([5, 40, 3], 0.9, [0, 1, 1], 0),
        step([0, -1, 7000], 1.5, [1, 1, 0], 12),
        step([1, 1, 2], 0.2, [0, 0, 0], 24),
        step([9, 9, 9], 0.2, [0, 2, -1], 36),
    ];
    tensors.write(gpu, &steps[0])?;
    tensors.draw(gpu)?; // loads the kernel
    let graph = Backend::record(gpu, &mut || tensors.draw(gpu))?.expect("this backend records");
    for step in &steps {
        tensors.write(gpu, step)?;
        graph.replay()?;
        let (tokens, valid) = tensors.found(gpu)?;
        for token in 0..TOKENS {
            let Some(row) = usize::try_from(step.rows[token]).ok().filter(|row| *row < 2) else {
                assert_eq!((tokens[token], valid[token]), (0, 0), "there is no row {}", step.rows[token]);
                continue;
            };
            let of_row = tensors.probs.view(Dtype::F32, 4 * row * VOCAB, &[1, VOCAB])?;
            let mut expected = [Ok(0)];
            let params = [step.params(token)];
            TokenSampling { scores: Scores::Probs(of_row), params: &params, out: &mut expected }.run(gpu)?;
            assert_eq!((Ok(tokens[token].cast_unsigned()), valid[token]), (expected[0].clone(), 1));
        }
    }
    Ok(())
}

fn selected_indices_are_in_the_memory_of_the_caller<M: Machine>(gpu: &Gpu<M>) -> tilewright::Result<()> {
    let scores: Vec<f32> = (0..2 * VOCAB).map(|i| (i * 7919 % 1009) as f32).collect();
    let scores = gpu.upload(bytemuck::cast_slice(&scores))?;
    let mut values = gpu.allocate(2 * 5 * 4)?;
    let (mut on_host, mut found) = ([0_i32; 10], [0_i32; 10]);
    let (top_k, mut on_device) = (TopK { k: 5, ties: TieBreak::Lowest, sorted: true }, gpu.allocate(40)?);
    let mut select = |indices: IndicesMut<'_>| {
        let values = values.view_mut(Dtype::F32, 0, &[2, 5])?;
        let scores = scores.view(Dtype::F32, 0, &[2, VOCAB])?;
        TopKSelection { scores, top_k, values, indices }.run(gpu)
    };
    select((&mut on_host[..]).into())?;
    select(on_device.indices_mut(0, 10)?)?;
    gpu.machine().read(on_device.address(), bytemuck::cast_slice_mut(&mut found))?;
    assert_eq!(found, on_host);
    assert!(found.iter().all(|&index| (index as usize) < VOCAB) && found[0] != found[1]);
    Ok(())
}

/// Counts below 1 keep all logits, and ids outside of the vocabulary end a draft; both calls are recorded.
fn masks_and_chains_read_arrays_on_the_device<M: Machine>(gpu: &Gpu<M>) -> tilewright::Result<()> {
    let scores: Vec<f32> = (0..2 * VOCAB).map(|i| 1.0 + (i * 7919 % 1009) as f32).collect();
    let draft_probs = gpu.upload(bytemuck::cast_slice(&scores))?;
    let (counts, ids) = (gpu.upload(&[1; 8])?, gpu.upload(&[0; 8])?);
    let (mut out, mut tokens, mut outcomes) =
        (gpu.allocate(8 * VOCAB)?, gpu.allocate(16)?, gpu.allocate(64)?);
    let target = gpu.upload(bytemuck::cast_slice(&[&scores[..], &scores[..]].concat()))?;
    let mut both = || {
        let logits = draft_probs.view(Dtype::F32, 0, &[2, VOCAB])?;
        let top_k = counts.indices(0, 2)?;
        TensorTopKMask { logits, top_k, out: out.view_mut(Dtype::F32, 0, &[2, VOCAB])? }.run(gpu)?;
        TensorChain {
            draft_probs: draft_probs.view(Dtype::F32, 0, &[2, 1, VOCAB])?,
            draft_ids: ids.indices(0, 2)?,
            target: Scores::Probs(target.view(Dtype::F32, 0, &[2, 2, VOCAB])?),
            params: TensorParams { seed: TensorParam::All(7), offset_step: 4, ..TensorParams::default() },
            tokens: tokens.indices_mut(0, 4)?,
            outcomes: outcomes.indices_mut(0, 16)?,
        }
        .run(gpu)
    };
    both()?; // loads the kernels
    let graph = Backend::record(gpu, &mut both)?.expect("this backend records");
    let mut ends = Vec::new();
    for (top_k, drafted) in
        [([3, 0], [2, -1]), ([-1, 1], [2, VOCAB as i32]), ([i32::MIN, VOCAB as i32], [2, i32::MAX])]
    {
        gpu.machine().write(counts.address(), bytemuck::cast_slice(&top_k))?;
        gpu.machine().write(ids.address(), bytemuck::cast_slice(&drafted))?;
        graph.replay()?;
        let (mut masked, mut found) = (vec![0.0_f32; 2 * VOCAB], [0_i32; 4]);
        gpu.machine().read(out.address(), bytemuck::cast_slice_mut(&mut masked))?;
        for (row, count) in top_k.into_iter().enumerate() {
            let kept = masked[row * VOCAB..][..VOCAB].iter().filter(|logit| logit.is_finite()).count();
            assert_eq!(kept, if count < 1 { VOCAB } else { count as usize });
        }
        gpu.machine().read(tokens.address(), bytemuck::cast_slice_mut(&mut found))?;
        // the target equals the draft, which is accepted
        assert_eq!((found[0], found[3]), (2, -1));
        assert!((0..VOCAB as i32).contains(&found[1]) && (0..VOCAB as i32).contains(&found[2]));
        ends.push(found);
    }
    assert!(ends.iter().all(|found| *found == ends[0]), "-1 and ids outside of the vocabulary are equal");
    Ok(())
}

crate::judge_machines!(
    masks_and_chains_read_arrays_on_the_device,
    selected_indices_are_in_the_memory_of_the_caller,
    replays_read_the_present_parameters,
);
