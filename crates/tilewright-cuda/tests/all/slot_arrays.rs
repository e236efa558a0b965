//! Appends to the slots of arrays in device memory: replays read the present arrays, and tokens without a slot are skipped.

use tilewright::{
    Backend, DeviceMemory, Dtype, KvCacheMut, KvLayout,
    kv::{
        Scale, ScaleMut, SlotArrays,
        append::{NewKv, QuantizedCacheMut, append_to_slots},
        mla::{MlaCacheMut, NewMla, append_mla_to_slots},
    },
};
use tilewright_cuda::{Gpu, Simulator, machine::Machine};

const TOKENS: usize = 3;
const PAGES: usize = 4;
const PAGE_SIZE: usize = 2;
const HEADS: usize = 2;
const DIM: usize = 4;
const SLOTS: usize = PAGES * PAGE_SIZE;

/// The arrays of one step.
struct Step {
    batch_indices: [i32; TOKENS],
    positions: [i32; TOKENS],
    indptr: [i32; 3],
    indices: [i32; 4],
    slot_mapping: [i64; TOKENS],
    /// The slots that tokens go to, by token.
    expected: [Option<usize>; TOKENS],
}

const STEPS: [Step; 3] = [
    Step {
        batch_indices: [0, 1, -1],
        positions: [3, 0, 0],
        indptr: [0, 2, 3],
        indices: [2, 0, 3, -7],
        slot_mapping: [1, 6, -1],
        expected: [Some(1), Some(6), None],
    },
    Step {
        batch_indices: [1, 2, 1],
        positions: [3, 0, 4],
        indptr: [0, 1, 3],
        indices: [1, 3, 0, 2],
        slot_mapping: [1, SLOTS as i64, 1 << 32],
        expected: [Some(1), None, None],
    },
    Step {
        batch_indices: [0, 0, 1],
        positions: [0, -1, 1],
        indptr: [0, 1, 2],
        indices: [4, 1, 1, 1],
        slot_mapping: [i64::MIN, -2, 3],
        expected: [None, None, Some(3)],
    },
];

/// Device memory of the arrays, the new tokens and the caches.
struct Tensors {
    batch_indices: DeviceMemory,
    positions: DeviceMemory,
    indptr: DeviceMemory,
    indices: DeviceMemory,
    slot_mapping: DeviceMemory,
    new: DeviceMemory,
    caches: [DeviceMemory; 2],
}

impl Tensors {
    fn new<M: Machine>(gpu: &Gpu<M>) -> tilewright::Result<Self> {
        let new: Vec<f32> = (1..=TOKENS * HEADS * DIM).map(|i| i as f32).collect();
        let cache = || gpu.allocate(4 * SLOTS * HEADS * DIM);
        Ok(Self {
            batch_indices: gpu.allocate(4 * TOKENS)?,
            positions: gpu.allocate(4 * TOKENS)?,
            indptr: gpu.allocate(4 * 3)?,
            indices: gpu.allocate(4 * 4)?,
            slot_mapping: gpu.allocate(8 * TOKENS)?,
            new: gpu.upload(bytemuck::cast_slice(&new))?,
            caches: [cache()?, cache()?],
        })
    }

    fn write<M: Machine>(&self, gpu: &Gpu<M>, step: &Step) -> tilewright::Result<()> {
        let write = |to: &DeviceMemory, bytes: &[u8]| gpu.machine().write(to.address(), bytes);
        write(&self.batch_indices, bytemuck::cast_slice(&step.batch_indices))?;
        write(&self.positions, bytemuck::cast_slice(&step.positions))?;
        write(&self.indptr, bytemuck::cast_slice(&step.indptr))?;
        write(&self.indices, bytemuck::cast_slice(&step.indices))?;
        write(&self.slot_mapping, bytemuck::cast_slice(&step.slot_mapping))?;
        let zeros = [0; 4 * SLOTS * HEADS * DIM];
        self.caches.iter().try_for_each(|cache| write(cache, &zeros))
    }

    fn append<M: Machine>(&mut self, gpu: &Gpu<M>, form: Form) -> tilewright::Result<()> {
        let arrays = match form {
            Form::Mapping => {
                let slot_mapping = self.slot_mapping.integers(0, TOKENS)?;
                SlotArrays::Mapping { slot_mapping, page_size: PAGE_SIZE }
            }
            Form::Paged | Form::Latent => SlotArrays::Paged {
                batch_indices: self.batch_indices.indices(0, TOKENS)?,
                positions: self.positions.indices(0, TOKENS)?,
                indptr: self.indptr.indices(0, 3)?,
                indices: self.indices.indices(0, 4)?,
                page_size: PAGE_SIZE,
            },
        };
        let [k, v] = &mut self.caches;
        if let Form::Latent = form {
            let (new, shape) = ([TOKENS, HEADS * DIM], [PAGES, PAGE_SIZE, HEADS * DIM]);
            let rows = || self.new.view(Dtype::F32, 0, &new);
            let (ckv, kpe) = (k.view_mut(Dtype::F32, 0, &shape)?, v.view_mut(Dtype::F32, 0, &shape)?);
            return append_mla_to_slots(
                gpu,
                NewMla { ckv: rows()?, kpe: rows()? },
                MlaCacheMut { ckv, kpe },
                &arrays,
            );
        }
        let shape = [PAGES, PAGE_SIZE, HEADS, DIM];
        let cache =
            KvCacheMut { k: k.view_mut(Dtype::F32, 0, &shape)?, v: v.view_mut(Dtype::F32, 0, &shape)? };
        let (k_scale, v_scale) = (ScaleMut::Static(Scale::One), ScaleMut::Static(Scale::Tensor(0.5)));
        let new = self.new.view(Dtype::F32, 0, &[TOKENS, HEADS, DIM])?;
        let cache = QuantizedCacheMut { cache, k_scale, v_scale };
        append_to_slots(gpu, NewKv { k: new, v: new }, cache, KvLayout::Nhd, &arrays)
    }

    /// Checks that both caches have the step's tokens and nothing else.
    fn check<M: Machine>(&self, gpu: &Gpu<M>, step: &Step, v_factor: f32) -> tilewright::Result<()> {
        let width = HEADS * DIM;
        for (cache, factor) in self.caches.iter().zip([1.0, v_factor]) {
            let mut expected = vec![0.0_f32; SLOTS * width];
            for (token, slot) in step.expected.iter().enumerate() {
                let Some(slot) = slot else { continue };
                let row = expected[slot * width..][..width].iter_mut();
                row.enumerate().for_each(|(i, to)| *to = factor * (token * width + i + 1) as f32);
            }
            let mut found = vec![0.0_f32; SLOTS * width];
            gpu.machine().read(cache.address(), bytemuck::cast_slice_mut(&mut found))?;
            assert_eq!(found, expected);
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy)]
enum Form {
    Paged,
    Mapping,
    Latent,
}

fn replays_read_the_present_arrays<M: Machine>(gpu: &Gpu<M>) -> tilewright::Result<()> {
    for (form, v_factor) in [(Form::Paged, 2.0), (Form::Mapping, 2.0), (Form::Latent, 1.0)] {
        let mut tensors = Tensors::new(gpu)?;
        tensors.write(gpu, &STEPS[0])?;
        tensors.append(gpu, form)?; // loads the kernel
        // a recording rejects allocations and copies from the host
        let graph = Backend::record(gpu, &mut || tensors.append(gpu, form))?.expect("this backend records");
        for step in &STEPS {
            tensors.write(gpu, step)?;
            graph.replay()?;
            tensors.check(gpu, step, v_factor)?;
        }
    }
    Ok(())
}

/// One array in device memory is enough; those on the host are uploaded, and their values are not checked.
fn some_arrays_are_on_the_host<M: Machine>(gpu: &Gpu<M>) -> tilewright::Result<()> {
    let (mut tensors, step) = (Tensors::new(gpu)?, &STEPS[1]);
    tensors.write(gpu, step)?;
    let arrays = SlotArrays::Paged {
        batch_indices: (&step.batch_indices).into(),
        positions: (&step.positions).into(),
        indptr: (&step.indptr).into(),
        indices: tensors.indices.indices(0, 4)?,
        page_size: PAGE_SIZE,
    };
    let [k, v] = &mut tensors.caches;
    let shape = [PAGES, PAGE_SIZE, HEADS * DIM];
    let rows = tensors.new.view(Dtype::F32, 0, &[TOKENS, HEADS * DIM])?;
    let cache =
        MlaCacheMut { ckv: k.view_mut(Dtype::F32, 0, &shape)?, kpe: v.view_mut(Dtype::F32, 0, &shape)? };
    append_mla_to_slots(gpu, NewMla { ckv: rows, kpe: rows }, cache, &arrays)?;
    tensors.check(gpu, step, 1.0)
}

/// The checked mode rejects tokens without a slot, and takes what arrays on the host may have.
#[test]
fn the_checked_mode_names_tokens_without_a_slot() -> tilewright::Result<()> {
    let gpu = Gpu::new(Simulator::new(80, 3).with_checks(true));
    let mut tensors = Tensors::new(&gpu)?;
    let paged = ["token 1: batch_index = 2 is not in 0..2", "page = 4 is not in 0..4"];
    for (form, reasons) in [
        (Form::Paged, paged),
        (Form::Latent, paged),
        (Form::Mapping, ["token 1: slot = 8 is not in 0..8", "token 0: slot = -9223372036854775808 is not"]),
    ] {
        tensors.write(&gpu, &STEPS[0])?;
        tensors.append(&gpu, form)?;
        tensors.check(&gpu, &STEPS[0], if matches!(form, Form::Latent) { 1.0 } else { 2.0 })?;
        for (step, reason) in STEPS[1..].iter().zip(reasons) {
            tensors.write(&gpu, step)?;
            let why = tensors.append(&gpu, form).expect_err("the step has tokens without a slot").to_string();
            assert!(why.starts_with("kv.append") && why.contains(reason), "{why}");
            // a recording reads nothing
            Backend::record(&gpu, &mut || tensors.append(&gpu, form))?;
        }
    }
    Ok(())
}

crate::judge_machines!(replays_read_the_present_arrays, some_arrays_are_on_the_host,);
