//! How many elements of a weight a rank updates, from sizes and mesh alone.

use super::Config;
use crate::model::Role;

/// Elements of a local weight, and how many ranks hold the same.
type HeldElements = (usize, usize);

/// Most elements of one weight that a rank has state of; absent where the mesh is impossible, or norms alone are trained.
pub(super) fn largest(config: &Config) -> Option<usize> {
    if !config.parallel.shapes().iter().all(|shape| shape.is_possible()) {
        return None;
    }
    let share = |(_, (elements, holders)): (Role, HeldElements)| {
        if config.parallel.zero > 0 { elements.div_ceil(holders) } else { elements }
    };
    let (all, frozen) = (tables_and_attention(config).into_iter().chain(feed_forwards(config)), config.frozen());
    all.filter(|(role, _)| !frozen.contains(role)).map(share).max()
}

/// Ranks with the same place in their tensor groups, and those that hold what sees split tokens.
fn holders(config: &Config) -> [usize; 2] {
    let parallel = &config.parallel;
    let data = parallel.ranks / parallel.tensor;
    [data, if parallel.sequence { parallel.ranks } else { data }]
}

fn tables_and_attention(config: &Config) -> Vec<(Role, HeldElements)> {
    let (model, tensor, [data, split]) = (&config.model, config.parallel.tensor, holders(config));
    let (d, blueprint) = (model.d_model, model.blueprint());
    let heads = blueprint.heads;
    let (queries, keys_values) = (heads.heads * heads.head_dim, 2 * heads.kv_heads * heads.head_dim);
    let rows = (model.vocab.div_ceil(tensor) * d, data);
    let mut all = vec![(Role::Embedding, rows)];
    if !model.tie_embeddings {
        all.push((Role::Head, rows));
    }
    if let Some(latent) = heads.latent {
        let narrow = [latent.query_rank.unwrap_or(0), latent.kv_rank + latent.rotary_dim];
        all.extend(narrow.map(|rank| (Role::Attention, (rank * d, config.parallel.ranks))));
        let wide = [
            (queries, latent.query_rank.unwrap_or(d)),
            (heads.heads * (latent.content_dim + latent.value_dim), latent.kv_rank),
        ];
        all.extend(wide.map(|(outputs, inputs)| (Role::Attention, (outputs / tensor * inputs, data))));
    } else if blueprint.is_segmented() {
        all.push((Role::Attention, (2 * d / tensor * d, data)));
    } else if heads.kv_heads.is_multiple_of(tensor) {
        all.push((Role::Attention, ((queries + keys_values) / tensor * d, data)));
    } else {
        // Heads of keys and values that are fewer than ranks are whole on each of them.
        let apart = [(queries / tensor * d, data), (keys_values * d, config.parallel.ranks)];
        all.extend(apart.map(|held| (Role::Attention, held)));
    }
    if blueprint.has_position_table() {
        all.push((Role::Embedding, (model.longest_row() * d, split)));
    }
    if !model.is_causal() {
        all.push((Role::Head, (d * d, data)));
    }
    all
}

fn feed_forwards(config: &Config) -> Vec<(Role, HeldElements)> {
    let (model, tensor, [data, split]) = (&config.model, config.parallel.tensor, holders(config));
    let (d, d_ff) = (model.d_model, model.d_ff.unwrap_or(4 * model.d_model));
    let matrices = if model.blueprint().is_gated() { 2 } else { 1 };
    let cut = |width: usize, slices: usize| matrices * width.div_ceil(slices) * d;
    let is_dense = |layer| config.moe.as_ref().is_none_or(|moe| !moe.layers.contains(layer));
    let dense = (0..model.layers).any(is_dense).then_some((Role::FeedForward, (cut(d_ff, tensor), data)));
    let Some(moe) = &config.moe else { return dense.into_iter().collect() };
    let width = moe.expert_width(d_ff);
    let beside = width * if moe.residual { 1 } else { moe.shared_experts };
    let experts = config.parallel.expert.pairs(&moe.experts).into_iter().map(|(degree, experts)| {
        let shape = config.parallel.shape().at(degree);
        let held = (most_experts(config, experts, degree) * cut(width, shape.expert_tensor), shape.expert_data());
        (Role::Experts, held)
    });
    let (router, beside) = ((moe.experts.largest() * d, split), (cut(beside, tensor), data));
    dense.into_iter().chain([(Role::Router, router), (Role::SharedExperts, beside)]).chain(experts).collect()
}

/// Experts of the rank of a group that has most.
fn most_experts(config: &Config, experts: usize, degree: usize) -> usize {
    let Some(table) = &config.parallel.expert_table else { return experts / degree };
    (0..degree).map(|rank| table.iter().filter(|owner| **owner == rank).count()).max().unwrap_or(0)
}
