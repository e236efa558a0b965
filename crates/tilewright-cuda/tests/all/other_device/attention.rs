//! Attention, plans and the KV cache.

use super::{Two, gpus, simulated, view, view_mut, zeros};
use std::{mem::replace, sync::Arc};
use tilewright::{
    Attention, Batch, Capacity, DeviceMemory, Dtype, HeadDim, Heads, KvCache, KvCacheMut, KvLayout, KvScales,
    Operator, Output, PageTable, Plan, Problem, Result, Scale, Split, Workspace,
    attention::{DeviceBatch, DevicePages, LatentCache, LatentQuery, StateMerge, merge_state, merge_states},
    kv::{
        AppendPlan, QuantizedCache, ScaleMut,
        append::{NewKv, NewTokens, QuantizedCacheMut, append_paged_kv_cache_quantized, append_planned},
    },
};
use tilewright_cuda::{Gpu, machine::Machine};

/// Four pages of one slot, for one head of 16 elements.
const CACHE: [usize; 4] = [4, 1, 1, 16];
const TABLE: ([i32; 2], [i32; 4], [i32; 1]) = ([0, 4], [0, 1, 2, 3], [1]);

fn table() -> PageTable<'static> {
    PageTable::new(&TABLE.0, &TABLE.1, &TABLE.2, 1)
}

fn operator<M: Machine>(gpu: &Gpu<M>) -> Attention<Gpu<M>> {
    let problem = Problem::builder(Heads { qo: 1, kv: 1 }, HeadDim::same(16)).build();
    Attention::new(problem.expect("it is sound"), gpu.clone()).expect("a kernel")
}

fn plan<M: Machine>(attention: &Attention<Gpu<M>>) -> Plan {
    attention.plan(&Batch::paged(&[0, 1], table())).expect("a plan")
}

/// Runs `plan_of_another`, or a plan of this backend, with `memory` as its arguments.
fn run<M: Machine>(
    gpu: &Gpu<M>,
    plan_of_another: Option<&Plan>,
    [q, k, v, k_scale, v_scale, o, lse, workspace]: &mut [DeviceMemory; 8],
) -> Result<()> {
    let attention = operator(gpu);
    let own = plan(&attention);
    // the workspace takes ownership of the memory
    let mut workspace = Workspace::on_device(replace(workspace, gpu.allocate(1)?));
    let scales = KvScales { k: Scale::Page(view(k_scale, &[4])), v: Scale::Page(view(v_scale, &[4])) };
    let out =
        Output { o: view_mut(o, &[1, 1, 16]), lse: Some(view_mut(lse, &[1, 1])), workspace: &mut workspace };
    let kv = QuantizedCache { cache: KvCache { k: view(k, &CACHE), v: view(v, &CACHE) }, scales };
    attention.run_scaled(plan_of_another.unwrap_or(&own), view(q, &[1, 1, 16]), kv, out)
}

#[test]
fn attention_and_plans() {
    let names = ["q", "k", "v", "k scale", "v scale", "o", "lse", "workspace"];
    judge!("attention.run", names, |gpu, memory| run(gpu, None, memory));
    plans_of_another(&simulated());
    gpus().into_iter().for_each(plans_of_another);
}

fn plans_of_another<M: Machine>([here, there]: &Two<M>) {
    let foreign = plan(&operator(there));
    let mut memory = [(); 8].map(|()| zeros(here));
    let text = run(here, Some(&foreign), &mut memory).expect_err("another device").to_string();
    assert_eq!(text, "attention.run: the plan is in the memory of device 1, expected device 0");
}

#[test]
fn batches_on_the_device() {
    let names = ["num_requests", "qo_indptr", "kv_indptr", "last_page_len", "indices"];
    judge!("attention.plan_on_device", names, bound);
}

/// Plans a batch without requests, with `memory` as its arrays.
fn bound<M: Machine>(gpu: &Gpu<M>, memory: &mut [DeviceMemory; 5]) -> Result<()> {
    let empty = Batch::paged(&[0], PageTable::new(&[0], &[0; 0], &[0; 0], 1));
    let attention = operator(gpu);
    let mut plan = attention.plan_with_capacity(&Capacity::decode(4, 4), &empty, Split::Balanced)?;
    let [num_requests, qo_indptr, kv_indptr, last_page_len, indices] =
        memory.each_mut().map(|memory| gpu.allocate(1).map(|other| Arc::new(replace(memory, other))));
    let batch = DeviceBatch {
        num_requests: num_requests?,
        qo_indptr: qo_indptr?,
        pages: DevicePages::Lists { kv_indptr: kv_indptr?, last_page_len: last_page_len?, indices: indices? },
    };
    attention.plan_on_device(&mut plan, batch)
}

#[test]
fn latent_attention() {
    let names = ["q", "q.pe", "k", "kpe"];
    judge!("attention.run", names, |gpu, [nope, pe, ckv, kpe]| {
        let attention = Attention::new(Problem::latent(1, 16, 8).scale(0.2).build()?, gpu.clone())?;
        let plan = attention.plan(&Batch::ragged(&[0, 1], &[0, 4]))?;
        let query = LatentQuery { nope: view(nope, &[1, 1, 16]), pe: view(pe, &[1, 1, 8]) };
        let cache = LatentCache { ckv: view(ckv, &[4, 16]), kpe: view(kpe, &[4, 8]) };
        let (mut o, mut workspace) = (zeros(gpu), Workspace::on_device(zeros(gpu)));
        let out = Output { o: view_mut(&mut o, &[1, 1, 16]), lse: None, workspace: &mut workspace };
        attention.run_latent(&plan, query, cache, out)
    });
}

#[test]
fn states_that_are_merged() {
    judge!("attention.merge_states", ["o", "lse", "out", "out_lse"], |gpu, [o, lse, out, out_lse]| {
        let (o, lse) = (view(o, &[1, 2, 1, 16]), view(lse, &[1, 2, 1]));
        merge_states(gpu, o, lse, view_mut(out, &[1, 1, 16]), view_mut(out_lse, &[1, 1]))
    });
    judge!("attention.merge_state", ["o", "lse", "other", "other_lse"], |gpu, [o, lse, other, other_lse]| {
        let (other, other_lse) = (view(other, &[1, 1, 16]), view(other_lse, &[1, 1]));
        merge_state(gpu, view_mut(o, &[1, 1, 16]), view_mut(lse, &[1, 1]), other, other_lse)
    },);
    let names = ["o", "lse", "other", "other_lse", "mask"];
    judge!("attention.merge_state", names, |gpu, [out, out_lse, o, lse, mask]| {
        StateMerge {
            o: view(o, &[1, 1, 16]),
            lse: view(lse, &[1, 1]),
            out: view_mut(out, &[1, 1, 16]),
            out_lse: view_mut(out_lse, &[1, 1]),
            in_place: true,
            mask: Some(mask.view(Dtype::I8, 0, &[1])?),
        }
        .run(gpu)
    },);
}

/// Appends a token to K and V caches in `memory`, with a scale for K.
fn append<M: Machine>(
    gpu: &Gpu<M>,
    [k, v, k_cache, v_cache, k_scale]: &mut [DeviceMemory; 5],
    plan: Option<&AppendPlan>,
) -> Result<()> {
    let new = NewKv { k: view(k, &[1, 1, 16]), v: view(v, &[1, 1, 16]) };
    let cache = QuantizedCacheMut {
        cache: KvCacheMut { k: view_mut(k_cache, &CACHE), v: view_mut(v_cache, &CACHE) },
        k_scale: ScaleMut::Static(Scale::Page(view(k_scale, &[4]))),
        v_scale: ScaleMut::Static(Scale::One),
    };
    let new_tokens = NewTokens { k: new.k, v: new.v, batch_indices: &[0], positions: &[2] };
    match plan {
        Some(plan) => append_planned(gpu, plan, new, cache, KvLayout::Nhd),
        None => append_paged_kv_cache_quantized(gpu, &new_tokens, cache, KvLayout::Nhd, &table()),
    }
}

#[test]
fn tokens_that_are_appended() {
    const QUANTIZED: &str = "kv.append_paged_kv_cache_quantized";
    let names = ["k", "v", "cache k", "cache v", "k scale"];
    judge!(QUANTIZED, names, |gpu, memory| append(gpu, memory, None));
    judge!(QUANTIZED, ["k"], |gpu, [k]| {
        let (mut cache, mut scales) = (zeros(gpu), zeros(gpu));
        let (mut v_cache, v) = (zeros(gpu), zeros(gpu));
        let cache = QuantizedCacheMut {
            cache: KvCacheMut { k: e4m3(&mut cache), v: e4m3(&mut v_cache) },
            k_scale: ScaleMut::Dynamic(view_mut(&mut scales, &[4, 1])),
            v_scale: ScaleMut::Static(Scale::One),
        };
        let new = NewTokens {
            k: view(k, &[1, 1, 16]),
            v: view(&v, &[1, 1, 16]),
            batch_indices: &[0],
            positions: &[2],
        };
        append_paged_kv_cache_quantized(gpu, &new, cache, KvLayout::Nhd, &table())
    });
    places_of_another(&simulated());
    gpus().into_iter().for_each(places_of_another);
}

fn places_of_another<M: Machine>([here, there]: &Two<M>) {
    let names = [(); 5];
    let mut foreign = AppendPlan::new(there, &table(), &[0], &[2]).expect("a plan");
    let text = append(here, &mut names.map(|()| zeros(here)), Some(&foreign)).expect_err("a plan");
    assert_eq!(
        text.to_string(),
        "kv.append_planned: the plan is in the memory of device 1, expected device 0"
    );
    // a refill moves the plan to the device that does it
    foreign.refill(here, &table(), &[0], &[3]).expect("there is room");
    append(here, &mut names.map(|()| zeros(here)), Some(&foreign)).expect("it is of this device");
}

fn e4m3(memory: &mut DeviceMemory) -> tilewright::ViewMut<'_> {
    memory.view_mut(Dtype::E4m3, 0, &CACHE).expect("it fits")
}
