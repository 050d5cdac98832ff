//! Trains a linear model on a mesh (replicate=2, shard=4). Each rank keeps a part of the weights
//! and has samples of its own.

use std::error::Error;
use std::sync::Arc;

use devicemesh::comm::{CallOptions, Operator, View, World, WorldOptions};

const WEIGHTS: usize = 64;
const SAMPLES: usize = 8;
const STEPS: usize = 200;
const RATE: f32 = 0.2;

/// The inputs of a sample. Replace this by your data.
fn input(sample: usize, i: usize) -> f32 {
    ((sample * WEIGHTS + i) * (sample + 7919) % 1009) as f32 / 504.0 - 1.0
}

fn main() -> Result<(), Box<dyn Error>> {
    // Two lines give a communicator for each dimension. Along the last one, ranks are neighbours.
    let world = Arc::new(World::join("cpu", &WorldOptions::default())?);
    let mesh = View::init(&world, &[2, 4], &["replicate", "shard"])?;
    let data = mesh.flatten(Some("data"), &CallOptions::default())?;

    let mut mine = vec![0.0_f32; WEIGHTS / 4];
    let (mut weights, mut my_gradient) = (vec![0.0; WEIGHTS], mine.clone());
    for step in 1..=STEPS {
        mesh.all_gather("shard", &mine, &mut weights)?;
        let (mut loss, mut gradient) = ([0.0_f32], vec![0.0; WEIGHTS]);
        for sample in (0..SAMPLES).map(|s| world.rank() * SAMPLES + s) {
            // The model should find that all weights are 1.
            let error: f32 = weights.iter().enumerate().map(|(i, weight)| (weight - 1.0) * input(sample, i)).sum();
            loss[0] += error * error / SAMPLES as f32;
            gradient.iter_mut().enumerate().for_each(|(i, sum)| *sum += error * input(sample, i) / SAMPLES as f32);
        }
        // The gradient is averaged over all ranks: first over the shards, each of which keeps its
        // part, and then over the replicas.
        mesh.reduce_scatter("shard", &gradient, &mut my_gradient, Operator::Average)?;
        mesh.all_reduce("replicate", &mut my_gradient, Operator::Average)?;
        mine.iter_mut().zip(&my_gradient).for_each(|(weight, slope)| *weight -= RATE * slope);
        data.all_reduce("data", &mut loss, Operator::Average)?;
        if world.rank() == 0 && (step == 1 || step % 50 == 0) {
            println!("step {step:3}: loss {:.4}", loss[0]);
        }
    }
    mesh.root_comms().finalize()?;
    Ok(())
}
